"""Derived values: filled in, explained, and never in place of what was given."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from elastic.base.config import Budget, DecoderModel, Fleet, Inner, Island, Job, Outer, PythonModel
from elastic.base.configfile import load_both, load_job
from elastic.base.presets import PRESETS
from elastic.base.resolve import Origin, leaves, resolve_fleet, resolve_job

pytestmark = pytest.mark.unit

JOB = Job(name="demo", budget=Budget(tokens=1000))


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_preset_fills_what_the_outer_optimiser_leaves_open(preset: str) -> None:
    """Every preset gives sync_every, lr, momentum and warmup, each with the preset as the reason."""
    resolved = resolve_job(JOB.model_copy(update={"outer": Outer(preset=preset)}))  # type: ignore[arg-type]
    outer, expected = resolved.value.outer, PRESETS[preset]
    found = (outer.sync_every, outer.lr, outer.momentum, outer.warmup)
    assert found == (expected.sync_every, expected.lr, expected.momentum, expected.warmup)
    assert resolved.origins["outer.lr"].source == "derived"
    assert resolved.origins["outer.lr"].why.startswith(f"preset {preset}: ")


def test_what_is_given_wins_over_the_preset() -> None:
    """A value of the user's own stays, also when it is zero."""
    outer = Outer(preset="diloco", warmup=0.0, momentum=0.0, sync_every=7)
    resolved = resolve_job(JOB.model_copy(update={"outer": outer})).value.outer
    assert (resolved.warmup, resolved.momentum, resolved.sync_every, resolved.lr) == (0.0, 0.0, 7, 0.7)


def test_folders_follow_from_the_name() -> None:
    """The run folder is runs/<name>, the cache lies in the run folder, a URL with or without a slash."""
    assert resolve_job(JOB).value.run_folder == "runs/demo"
    assert resolve_job(JOB).value.data.cache_folder == "runs/demo/data"
    url = resolve_job(JOB.model_copy(update={"run_folder": "s3://b/r/"}))
    assert (url.value.run_folder, url.value.data.cache_folder) == ("s3://b/r/", "~/.cache/elastic")


@pytest.mark.parametrize(("d_model", "ffn_dim"), [(128, 352), (256, 688), (768, 2048), (2048, 5472), (6, 16)])
def test_the_feed_forward_width_is_eight_thirds_rounded_up(d_model: int, ffn_dim: int) -> None:
    """8/3 of the width, up to the next multiple of 16."""
    job = JOB.model_copy(update={"model": DecoderModel(d_model=d_model, num_heads=1)})
    model = resolve_job(job).value.model
    assert isinstance(model, DecoderModel)
    assert model.ffn_dim == ffn_dim
    assert model.ffn_dim % 16 == 0
    assert 0 <= model.ffn_dim - d_model * 8 / 3 < 16


def test_heads_and_micro_batch() -> None:
    """As many key heads as query heads; the whole batch at once, up to 32 sequences."""
    resolved = resolve_job(JOB.model_copy(update={"inner": Inner(batch_sequences=100)}))
    assert resolved.value.inner.micro_batch_sequences == 32
    assert (
        resolve_job(
            JOB.model_copy(update={"inner": Inner(batch_sequences=5)})
        ).value.inner.micro_batch_sequences
        == 5
    )
    model = resolved.value.model
    assert isinstance(model, DecoderModel)
    assert model.num_kv_heads == model.num_heads


def test_other_models_have_nothing_derived() -> None:
    """A model of the user's own gets no decoder fields."""
    job = JOB.model_copy(update={"model": PythonModel(kind="python", entry="m:f")})
    origins = resolve_job(job).origins
    assert {key for key in origins if key.startswith("model.")} == {
        "model.kind",
        "model.entry",
        "model.arguments",
    }


def test_threads_of_a_worker_are_its_cpus() -> None:
    """At least one thread, and no fractions."""
    islands = [
        Island(name=f"i{i}", region="r", cpus_per_worker=cpus) for i, cpus in enumerate((0.5, 1, 2.9, 8))
    ]
    resolved = resolve_fleet(Fleet(islands=islands))
    assert [island.threads_per_worker for island in resolved.value.islands] == [1, 1, 2, 8]
    assert resolved.origins["islands.3.threads_per_worker"] == Origin(
        8, "derived", "cpus_per_worker 8, at least 1"
    )


def test_the_control_region_is_left_to_the_run_and_says_so() -> None:
    """Nothing here knows the driver's node; the origin says what will be taken."""
    origin = resolve_fleet(Fleet(islands=[Island(name="a", region="r")])).origins["control_region"]
    assert origin == Origin(None, "derived", "the driver's own node")


def test_all_islands_are_needed_unless_said_otherwise() -> None:
    """`min_islands` left out means all of them."""
    islands = [Island(name="a", region="r"), Island(name="b", region="r")]
    assert resolve_fleet(Fleet(islands=islands)).value.min_islands == 2
    assert resolve_fleet(Fleet(islands=islands, min_islands=1)).value.min_islands == 1


def test_every_value_has_an_origin() -> None:
    """No value of the resolved job goes without source, and the origins hold the values in use."""
    resolved = resolve_job(JOB)
    values = {".".join(map(str, path)): value for path, value in leaves(resolved.value)}
    assert {key: origin.value for key, origin in resolved.origins.items()} == values
    assert resolved.origins["name"].source == "argument"
    assert resolved.origins["budget.tokens"].source == "argument"
    assert resolved.origins["budget.epochs"].source == "default"


def test_resolving_twice_changes_nothing() -> None:
    """A resolved job is a fixed point; the original is untouched."""
    once = resolve_job(JOB).value
    assert resolve_job(once).value == once
    assert JOB.run_folder is None


def test_origins_tell_file_override_default_and_derived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the four sources is recognised, with position or reason; short forms count as given."""
    monkeypatch.chdir(tmp_path)
    Path("j.yaml").write_text("name: demo\nbudget:\n  tokens: 1000\ninner: {betas: [0.8, 0.9]}\n", "utf-8")
    Path("f.yaml").write_text("islands:\n  - {name: us, region: r, workers: 2}\n", "utf-8")
    job, fleet = load_both(
        "j.yaml", "f.yaml", ["seed=3", "outer={lr: 0.5}", "fleet.islands.us.cpus_per_worker=2"]
    )
    assert job.origins["budget.tokens"] == Origin(1000, "file", position="j.yaml:3:11")
    assert job.origins["inner.betas"] == Origin((0.8, 0.9), "file", position="j.yaml:4:16")
    assert job.origins["seed"] == Origin(3, "override", position="override 'seed=3'")
    assert job.origins["outer.lr"] == Origin(0.5, "override", position="override 'outer={lr: 0.5}'")
    assert job.origins["outer.momentum"].source == "derived"
    assert job.origins["inner.lr"] == Origin(3e-3, "default")
    assert job.origins["model.kind"] == Origin("decoder", "default")
    assert fleet.origins["islands.0.workers.max"] == Origin(2, "file", position="f.yaml:2:36")
    assert fleet.origins["islands.0.cpus_per_worker"].source == "override"
    assert job.where("seed") == "override 'seed=3'"
    assert job.where("inner.lr") == "inner.lr"


def test_a_resolved_job_survives_json_and_pickle(tmp_path: Path) -> None:
    """What run.json and Ray carry comes back equal."""
    (tmp_path / "j.yaml").write_text("name: demo\nbudget: {epochs: 1.5}\n", "utf-8")
    resolved = load_job(tmp_path / "j.yaml")
    assert Job.model_validate_json(resolved.value.model_dump_json()) == resolved.value
    assert pickle.loads(pickle.dumps(resolved)) == resolved
