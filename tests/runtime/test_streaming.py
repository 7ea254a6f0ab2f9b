"""Fragments, overlap and few bits: the same promises as with one fragment and no overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.runtime.island_rank import IslandRank
from elastic.state.audit import audit

pytestmark = pytest.mark.unit

TOTAL = 192
SHAPES: dict[str, dict[str, Any]] = {
    "two fragments": {"fragments": 2, "overlap_steps": 0, "alpha": 0.0},
    "overlap": {"fragments": 1, "overlap_steps": 2, "alpha": 0.5},
    "keep progress": {"fragments": 2, "overlap_steps": 2, "mix": "keep-progress"},
    "streaming": {"fragments": 2, "overlap_steps": 2, "alpha": 0.5, "codec_up": "int4", "codec_down": "int4"},
    "overlap beyond a fragment": {"fragments": 3, "overlap_steps": 3, "alpha": 0.5, "codec_down": "e3m0"},
    "whole period": {"fragments": 2, "overlap_steps": 6, "alpha": 0.5},
}


def streaming(lab: Any, shape: str, sequences: int = TOTAL, **outer: Any) -> Any:
    """A small job in fragments: H 6, three layers."""
    settings = {"sync_every": 6, "codec_up": "fp32", "codec_down": "fp32", **SHAPES[shape], **outer}
    model = {"kind": "decoder", "d_model": 16, "num_layers": 3, "num_heads": 2}
    return lab.job(
        sequences=sequences, preset="streaming", outer=settings, model=model, checkpoint={"island_every": 2}
    )


def unkept_promises(run: Any) -> list[str]:
    """The checks of the audit that fail; a run in one process has no run.json."""
    checks = [check for check in audit(run.storage).checks if check.name != "run file"]
    return [f"{check.name}: {check.detail}" for check in checks if not check.ok]


@pytest.fixture(scope="module", params=list(SHAPES))
def undisturbed(
    request: pytest.FixtureRequest, make_lab: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any]:
    """A run of each shape in which nothing happens."""
    lab = make_lab(tmp_path_factory.mktemp("undisturbed"))
    return request.param, lab.run(streaming(lab, request.param))


def test_everything_is_committed_once_and_the_audit_passes(undisturbed: Any) -> None:
    """All sequences are merged into every fragment; files, digests and records agree."""
    _, run = undisturbed
    run.finished(TOTAL)
    assert unkept_promises(run) == []
    assert run.snapshot.counters["replayed_sequences"] == 0


def test_two_runs_publish_identical_digests(lab: Any, undisturbed: Any) -> None:
    """Same seed, same islands: the same bits of every version of every fragment."""
    shape, run = undisturbed
    again = lab.run(streaming(lab, shape)).finished(TOTAL)
    assert again.fragment_digests == run.fragment_digests


@pytest.mark.parametrize("step", [1, 4, 5, 9, 17])
def test_stopped_anywhere_and_continued_it_is_the_same_run(lab: Any, undisturbed: Any, step: int) -> None:
    """Whatever is under way when the run is stopped is sent again; the versions have the same bits."""
    shape, run = undisturbed

    def stop(rank: IslandRank) -> None:
        rank.link.stop("a test")  # type: ignore[attr-defined]

    job = streaming(lab, shape)
    stopped = lab.run(job, tamper={"us": lab.before_step(step, stop)})
    assert set(stopped.outcome.endings.values()) == {"stopped"}
    continued = lab.run(job).finished(TOTAL)
    assert continued.fragment_digests == run.fragment_digests
    assert continued.snapshot.counters["replayed_sequences"] == 0


@pytest.mark.parametrize("step", [2, 8, 13])
def test_a_crashed_island_comes_back_in_phase(lab: Any, undisturbed: Any, step: int) -> None:
    """Its work since the last merges is done again; nobody waits for ever; all is committed once."""
    shape, _ = undisturbed

    def crash(rank: IslandRank) -> None:
        if len(run_ranks) == 1:
            raise OSError("no power")

    run_ranks: list[int] = []

    def tamper(rank: IslandRank) -> None:
        run_ranks.append(1)
        lab.before_step(step, crash)(rank)

    run = lab.run(streaming(lab, shape), tamper={"us": tamper}, restarts=1)
    run.finished(TOTAL, errors=("us",))
    assert unkept_promises(run) == []


def test_the_progress_of_the_schedule_is_smooth(lab: Any, undisturbed: Any) -> None:
    """Every island's learning rate follows the tokens of all, also between versions."""
    shape, _ = undisturbed
    rates: dict[str, list[float]] = {"eu": [], "us": []}

    def watch(rank: IslandRank) -> None:
        wrapped = rank.inner.step

        def step(lr: float) -> None:
            rates[rank.name].append(lr)
            wrapped(lr)

        rank.inner.step = step  # type: ignore[method-assign]

    lab.run(streaming(lab, shape), tamper={"eu": watch, "us": watch}).finished(TOTAL)
    assert len(rates["eu"]) == len(rates["us"]) == TOTAL // 8
    assert rates["eu"] == pytest.approx(rates["us"])
    job = streaming(lab, shape)
    from elastic.policy.schedule import lr_at

    expected = [lr_at((number + 1) * 8 / TOTAL, job.inner) for number in range(TOTAL // 8)]
    assert rates["eu"] == pytest.approx(expected, rel=1e-6)


def test_four_bits_cost_an_eighth(lab: Any, undisturbed: Any) -> None:
    """Deltas and versions in int4 take about an eighth of the bytes of fp32."""
    shape, run = undisturbed
    if shape != "streaming":
        return
    full = lab.run(streaming(lab, shape, codec_up="fp32", codec_down="fp32")).finished(TOTAL)
    ratio = run.snapshot.counters["bytes_up"] / full.snapshot.counters["bytes_up"]
    assert 0.125 < ratio < 0.4  # rows of 16 columns: the scales weigh more than in a real model


def test_a_warm_up_leads_into_the_fragments(lab: Any) -> None:
    """After synchronous steps all fragments begin at the same version; two runs agree."""
    runs = [
        lab.run(streaming(lab, "streaming", warmup=0.3), folder=name).finished(TOTAL) for name in ("a", "b")
    ]
    assert runs[0].fragment_digests == runs[1].fragment_digests
    anchors = [record for record in runs[0].steps if record.kind == "anchor"]
    assert all(len(set(record.body["versions"])) == 1 for record in anchors)
    assert unkept_promises(runs[0]) == []
    assert torch.tensor([runs[0].snapshot.version]).item() > len(anchors)


def _slow(rank: IslandRank) -> None:
    """Every inner step takes a hundredth of a second longer."""
    wrapped = rank.inner.step

    def step(lr: float) -> None:
        time.sleep(0.01)
        wrapped(lr)

    rank.inner.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("max_staleness", [0, 8])
def test_a_slow_island_holds_nobody_up_and_loses_nothing(lab: Any, max_staleness: int) -> None:
    """Quorum 1 of 2: the fast island goes on alone; what comes late is merged with less weight, or redone."""
    outer = {"quorum": 1, "grace_s": 0.0, "max_staleness": max_staleness, "weights": "tokens_rate"}
    run = lab.run(streaming(lab, "streaming", **outer), tamper={"us": _slow}).finished(TOTAL)
    assert unkept_promises(run) == []
    merged = [(entry, r.body["version"]) for r in run.steps for entry in r.body["contributions"]]
    late = [entry for entry, version in merged if entry["base_version"] < version - 1]
    alone = [r for r in run.steps if len(r.body["contributions"]) == 1]
    assert alone
    assert max(record.body["scale"] for record in alone) <= 1.0
    if max_staleness:
        assert late
        assert all(entry["weight"] < 1.0 for entry in late)
    else:
        assert not late
        assert all("starts from version" in event["reason"] for event in run.events("refused"))


def test_an_island_that_gets_more_data_after_a_flush_goes_on(lab: Any, undisturbed: Any) -> None:
    """One island has handed in everything out of turn when the other dies, and takes over its data."""
    shape, _ = undisturbed

    def die(rank: IslandRank) -> None:
        lab.until(lambda: rank.link.board.membership.state("eu") == "idle")  # type: ignore[attr-defined]
        raise OSError("no power")

    # Nothing is too late, so each island trains its own half of the data: 24 steps.
    job = streaming(lab, shape, quorum=1, max_staleness=100)
    run = lab.run(job, tamper={"us": lab.before_step(20, die)}).finished(TOTAL, errors=("us",))
    assert unkept_promises(run) == []
