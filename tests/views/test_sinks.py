"""Metrics in other tools: the x axis never goes back, repeated steps replace older ones."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.base.errors import ConfigError
from elastic.base.events import KINDS, make_event
from elastic.state.storage import Storage
from elastic.views.event_log import Event
from elastic.views.sinks import ISLAND_METRICS, OUTER_METRICS, Metrics, TensorBoardSink, WandbSink

pytestmark = pytest.mark.unit


def event(kind: str, **fields: object) -> Event:
    """An event; fields that are not given are None."""
    return make_event(kind, "w", 0, 1_700_000_000.0, {**dict.fromkeys(KINDS[kind].fields), **fields})


def step(number: int, generation: int = 1, loss: object = 2.0) -> Event:
    """Progress of island us."""
    fields = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 5.0, "stall_s": 0.0}
    return event("island_progress", island="us", generation=generation, step=number, loss=loss, **fields)


def outer(version: int) -> Event:
    """A version for every 100 tokens."""
    fields = {
        "delta_norm": 0.5,
        "merge_s": 0.1,
        "bytes_up": 10,
        "bytes_down": 20,
        "committed_sequences": version,
    }
    return event("outer_step", version=version, fragment=0, committed_tokens=version * 100, **fields)


def joined(generation: int, resumed_step: int) -> Event:
    """Island us is up."""
    return event("island_joined", island="us", generation=generation, workers=1, resumed_step=resumed_step)


def records(folder: Path) -> list:
    """All events of the TensorBoard files of a folder, in the order in which it reads them."""
    from tensorboardX.proto.event_pb2 import Event as Proto

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):
            (length,) = struct.unpack_from("<Q", data, offset)
            found.append(Proto.FromString(data[offset + 12 : offset + 12 + length]))
            offset += 12 + length + 4
    return found


def scalars(folder: Path, tag: str) -> list[int]:
    """Steps of a tag."""
    return [r.step for r in records(folder) if r.summary.value and r.summary.value[0].tag == tag]


def test_all_documented_metrics_are_written_and_no_others(tmp_path: Path) -> None:
    """OUTER_METRICS and ISLAND_METRICS are the whole interface; outer ones count tokens, inner ones steps."""
    storage = Storage(tmp_path / "run")
    sink = TensorBoardSink(storage)
    sink(event("run_started", run="r", attempt=1, epoch=1))
    sink(joined(1, 0))
    sink(step(7))
    sink(outer(3))
    sink(event("validated", version=3, loss=1.9, nats_per_byte=1.8, sequences=64, final=False))
    sink.close()
    for folder, metrics, x in (("outer", OUTER_METRICS, 300), ("islands/us", ISLAND_METRICS, 7)):
        found = {
            value.tag: (record.step, record.wall_time)
            for record in records(tmp_path / "run" / "tensorboard" / folder)
            for value in record.summary.value
        }
        assert found == dict.fromkeys(metrics, (x, 1_700_000_000.0))


def test_repeated_steps_replace_the_older_ones(tmp_path: Path) -> None:
    """Crash at step 212, continue after 200: TensorBoard is told to forget 201 and later, then gets them."""
    sink = TensorBoardSink(Storage(tmp_path))
    sink(event("run_started", run="r", attempt=1, epoch=1))
    sink(joined(1, 0))
    for number in range(198, 213):
        sink(step(number))
    sink.close()
    sink = TensorBoardSink(Storage(tmp_path))
    sink(event("run_started", run="r", attempt=2, epoch=2))
    sink(joined(2, 200))
    sink(step(213, generation=1))  # the old incarnation's last word comes late
    sink(step(201, generation=2))
    sink.close()
    folder = tmp_path / "tensorboard" / "islands" / "us"
    restarts = [r.step for r in records(folder) if r.HasField("session_log")]
    assert restarts == [1, 201]
    assert scalars(folder, "inner/loss") == [*range(198, 213), 201]


def test_an_incarnation_that_nobody_announced_has_a_file_of_its_own(tmp_path: Path) -> None:
    """A view that missed the joining sees the new generation in its progress, and forgets what it repeats."""
    sink = TensorBoardSink(Storage(tmp_path))
    sink(joined(1, 0))
    sink(step(210))
    sink(step(205, generation=2))
    sink.close()
    folder = tmp_path / "tensorboard" / "islands" / "us"
    assert [r.step for r in records(folder) if r.HasField("session_log")] == [1, 205]


def test_two_incarnations_within_a_second_have_files_of_their_own(tmp_path: Path) -> None:
    """A quick restart does not overwrite the file of the incarnation before."""
    sink = TensorBoardSink(Storage(tmp_path))
    sink(event("run_started", run="r", attempt=1, epoch=1))
    for generation in (1, 2, 3):
        sink(joined(generation, 0))
        sink(step(generation, generation))
    sink.close()
    assert len(list((tmp_path / "tensorboard" / "islands" / "us").iterdir())) == 3


def test_in_a_bucket_the_files_are_uploaded_by_close() -> None:
    """A run folder that is not local gets the same files."""
    storage = Storage("memory://test-sinks/run")
    sink = TensorBoardSink(storage)
    sink(outer(1))
    assert storage.list("tensorboard") == []
    sink.close()
    (name,) = storage.list("tensorboard")
    assert name.startswith("tensorboard/outer/events.out.tfevents.")


def test_validation_belongs_to_the_tokens_of_its_version() -> None:
    """A judgement that comes two versions later is drawn where its version was."""
    metrics = Metrics()
    for version in (1, 2, 3):
        metrics.points(outer(version))
    (point,) = metrics.points(event("validated", version=1, loss=2.0, sequences=64, final=False))
    assert (point.x, point.values) == (100, {"validation/loss": 2.0})


def test_wandb_gets_tokens_and_steps_as_axes() -> None:
    """Each metric is bound to its axis before its first value, and rows carry the generation."""
    calls: list[tuple] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric=None: calls.append(("define", name, step_metric)),
        log=lambda row: calls.append(("log", row)),
        finish=lambda: calls.append(("finish",)),
    )
    started = {}

    def init(**arguments: object) -> SimpleNamespace:
        started.update(arguments)
        return run

    sink = WandbSink("project", "quick", {"a": 1}, load=lambda: SimpleNamespace(init=init))
    assert (started["id"], started["resume"]) == ("quick", "allow")  # attempts share one W&B run
    sink(step(7, generation=2))
    sink(outer(3))
    sink.close()
    assert ("define", "us/*", "us/step") in calls
    assert ("define", "outer/version", "committed_tokens") in calls
    (inner, outer_row) = (call[1] for call in calls if call[0] == "log")
    assert inner["us/step"] == 7
    assert inner["us/generation"] == 2
    assert inner["us/inner/loss"] == 2.0
    assert outer_row["committed_tokens"] == 300
    assert calls[-1] == ("finish",)


def test_wandb_without_its_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was set, and what to install."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging\.wandb_project(.|\n)*elastic-islands\[wandb\]"):
        WandbSink("project", "quick", {})


def test_every_metric_is_documented() -> None:
    """docs/howto/watch.md names every metric that is written."""
    page = Path(__file__).parents[2].joinpath("docs/howto/watch.md").read_text()
    assert [name for name in {**OUTER_METRICS, **ISLAND_METRICS} if f"`{name}`" not in page] == []
