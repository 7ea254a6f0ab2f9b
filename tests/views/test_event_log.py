"""The event log: complete segments in order, nothing lost but progress, nothing half-read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.base.errors import IntegrityError, RunFolderError, StorageError
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog, EventTail, read_events, segment_name

pytestmark = pytest.mark.unit


class FlakyStorage(Storage):
    """A run folder that is away while `away` is set, and can lose the answer of a write."""

    away = False
    lose_next_answer = False

    def create(self, name: str, data: bytes) -> None:
        if self.away:
            raise StorageError("storage is away", where=name)
        super().create(name, data)
        if self.lose_next_answer:
            self.lose_next_answer = False
            raise StorageError("the answer got lost", where=name)


@pytest.fixture
def storage(tmp_path: Path) -> FlakyStorage:
    """A local run folder."""
    return FlakyStorage(tmp_path / "run")


def clock_of(*times: float):
    """A clock that says these times, then repeats the last."""
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def warn(log: EventLog, what: str) -> None:
    """Emit one fact."""
    log.emit("warning", {"what": what})


def progress_fields(step: int) -> dict[str, object]:
    """Fields of one island_progress."""
    names = ("generation", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "stall_s")
    return {"island": "us", "step": step, "phase": "outer", **dict.fromkeys(names, 1)}


def whats(events: Iterator[dict[str, object]] | list[dict[str, object]]) -> list[object]:
    """The texts of warnings."""
    return [event.get("what", event["kind"]) for event in events]


def test_events_come_back_as_they_were_emitted(storage: FlakyStorage) -> None:
    """What is emitted is what a reader of the folder sees, after `close`."""
    with EventLog(storage, "controller-a1", clock_of(5.0)) as log:
        log.emit("derived", {"key": "outer.lr", "value": (1, float("nan"), {"a": 2.5}), "why": "preset"})
    (event,) = read_events(storage)
    assert event == {
        "time": 5.0, "writer": "controller-a1", "n": 0, "kind": "derived",
        "key": "outer.lr", "value": [1, "nan", {"a": 2.5}], "why": "preset",
    }  # fmt: skip
    assert storage.list("events") == ["events/controller-a1/000000.jsonl"]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("warnings", {"what": "x"}, "unknown event kind"),
        ("warning", {}, "missing fields"),
        ("warning", {"what": "x", "where": "y"}, "unknown fields"),
    ],
)
def test_the_catalogue_is_enforced(storage: FlakyStorage, kind: str, fields: dict, message: str) -> None:
    """A misspelt kind or field is refused where it is emitted, and nothing is written."""
    with EventLog(storage, "w") as log, pytest.raises(ValueError, match=message):
        log.emit(kind, fields)
    assert list(read_events(storage)) == []


def test_values_json_cannot_hold_are_refused_at_the_emitter(storage: FlakyStorage) -> None:
    """A tensor-like object that is no scalar is a bug of the caller, named at once."""
    with EventLog(storage, "w") as log, pytest.raises(TypeError, match="an event cannot hold"):
        warn(log, object())  # type: ignore[arg-type]


def test_scalars_of_array_libraries_become_numbers(storage: FlakyStorage) -> None:
    """0-d arrays may be emitted as they are."""
    import numpy as np

    with EventLog(storage, "w") as log:
        log.emit("warning", {"what": np.float32(0.5)})
    assert whats(read_events(storage)) == [0.5]


def test_a_full_buffer_is_written_without_waiting_for_the_interval(storage: FlakyStorage) -> None:
    """`flush_every` events wake the writer although `flush_every_s` is far away."""
    written = threading.Event()
    original = storage.create
    storage.create = lambda name, data: (original(name, data), written.set())  # type: ignore[method-assign]
    log = EventLog(storage, "w", flush_every_s=3600, flush_every=3)
    for number in range(3):
        warn(log, str(number))
    assert written.wait(10)
    assert whats(read_events(storage)) == ["0", "1", "2"]
    log.close()


def test_emit_does_not_wait_for_storage(storage: FlakyStorage) -> None:
    """A write that hangs holds no lock that `emit` needs."""
    hanging, go_on = threading.Event(), threading.Event()
    original = storage.create

    def slow(name: str, data: bytes) -> None:
        hanging.set()
        assert go_on.wait(30)
        original(name, data)

    storage.create = slow  # type: ignore[method-assign]
    log = EventLog(storage, "w", flush_every_s=3600, flush_every=1)
    warn(log, "first")
    assert hanging.wait(10)
    warn(log, "second")  # would time out with the test if it waited
    go_on.set()
    log.close()
    assert whats(read_events(storage)) == ["first", "second"]


def test_only_progress_is_dropped_while_storage_is_away(storage: FlakyStorage) -> None:
    """Facts survive an outage of any length; dropped progress is counted, and a warning says how many."""
    storage.away = True
    log = EventLog(storage, "w", flush_every_s=3600, max_buffered=10)
    for step in range(50):
        log.emit("island_progress", progress_fields(step))
        warn(log, f"fact {step}")
    with pytest.raises(StorageError):
        log.flush()
    storage.away = False
    log.flush()
    log.close()
    events = list(read_events(storage))
    facts = [what for what in whats(events) if str(what).startswith("fact")]
    assert facts == [f"fact {step}" for step in range(50)]
    kept = sum(event["kind"] == "island_progress" for event in events)
    assert log.dropped_progress == 50 - kept > 0
    assert whats(events)[-1] == f"storage was away: {50 - kept} progress events were not logged"
    numbers = [event["n"] for event in events]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] - numbers[0] + 1 - len(numbers) == log.dropped_progress  # gaps show where


def test_an_error_in_the_background_is_kept_and_raised_by_close(storage: FlakyStorage) -> None:
    """Nobody can end a run without hearing that its events are not in storage."""
    storage.away = True
    log = EventLog(storage, "w", flush_every_s=0.01)
    warn(log, "lost")
    for _ in range(1000):
        if log.error is not None:
            break
        threading.Event().wait(0.01)
    assert isinstance(log.error, StorageError)
    with pytest.raises(StorageError):
        log.close()
    log.close()  # a second call does nothing


def test_a_lost_answer_does_not_double_events(storage: FlakyStorage) -> None:
    """A segment whose write succeeded without us knowing is written again as it is, and found there."""
    log = EventLog(storage, "w", flush_every_s=3600)
    warn(log, "one")
    storage.lose_next_answer = True
    with pytest.raises(StorageError):
        log.flush()
    warn(log, "two")
    log.close()
    assert whats(read_events(storage)) == ["one", "two"]


def test_two_processes_under_one_name_are_named(storage: FlakyStorage) -> None:
    """A second live writer of a name is refused instead of mixed in."""
    first, second = (EventLog(storage, "w", clock_of(t), flush_every_s=3600) for t in (1.0, 2.0))
    warn(first, "a")
    warn(second, "b")
    first.close()
    with pytest.raises(RunFolderError, match="two processes write events under one name"):
        second.close()


def test_a_writer_name_that_was_used_goes_on_after_its_segments(storage: FlakyStorage) -> None:
    """A restarted process neither overwrites nor repeats event numbers."""
    for what in ("one", "two"):
        with EventLog(storage, "w") as log:
            warn(log, what)
    assert [(event["n"], event["what"]) for event in read_events(storage)] == [(0, "one"), (1, "two")]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x"])
def test_a_writer_name_is_a_plain_name(storage: FlakyStorage, name: str) -> None:
    """A writer's name is one folder, never a path."""
    with pytest.raises(ValueError, match="a writer is"):
        EventLog(storage, name)


def test_many_threads_share_one_log(storage: FlakyStorage) -> None:
    """Numbers are unique and without gaps, and each thread's events keep their order."""
    with EventLog(storage, "w", flush_every_s=0.005, flush_every=7) as log:

        def work(name: str) -> None:
            for step in range(100):
                warn(log, f"{name}{step}")

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = list(read_events(storage))
    assert [event["n"] for event in events] == list(range(400))
    for name in "abcd":
        mine = [what for what in whats(events) if str(what).startswith(name)]
        assert mine == [f"{name}{step}" for step in range(100)]


def test_listeners_hear_everything_and_a_broken_one_is_switched_off(storage: FlakyStorage) -> None:
    """A view that raises does not end the run; it is named once and not called again."""
    heard: list[object] = []
    calls = []

    def broken(event: dict[str, object]) -> None:
        calls.append(event)
        raise OSError("no terminal")

    with EventLog(storage, "w") as log:
        log.add_listener(broken)
        log.add_listener(lambda event: heard.append(event.get("what")))
        warn(log, "one")
        warn(log, "two")
    assert len(calls) == 1
    assert set(heard) >= {"one", "two"}
    assert any("broken failed and is switched off: OSError('no terminal')" in str(what) for what in heard)


def test_events_of_other_processes_reach_listeners_and_are_not_logged_again(storage: FlakyStorage) -> None:
    """`tell` passes on what the synchronizer has logged, with the same guard against a broken view."""
    heard: list[object] = []

    def broken(event: dict[str, object]) -> None:
        raise BrokenPipeError

    with EventLog(storage, "controller-a1") as log:
        log.add_listener(broken)
        log.add_listener(lambda event: heard.append(event["what"]))
        log.tell({"time": 1.0, "writer": "synchronizer-a1", "n": 7, "kind": "warning", "what": "theirs"})
    assert "theirs" in heard
    (mine,) = read_events(storage)
    assert "broken failed and is switched off: BrokenPipeError()" in str(mine["what"])


def test_nothing_is_emitted_after_close(storage: FlakyStorage) -> None:
    """An event that could not be written any more is an error, not a silent loss."""
    log = EventLog(storage, "w")
    log.close()
    with pytest.raises(RuntimeError, match="after the event log 'w' was closed"):
        warn(log, "late")


# ----------------------------------------------------------------------------------------- reading


def put(storage: Storage, writer: str, number: int, *times: float) -> None:
    """Write a segment by hand."""
    lines = [
        json.dumps({"time": t, "writer": writer, "n": n, "kind": "warning", "what": f"{writer}{t:g}"})
        for n, t in enumerate(times)
    ]
    storage.create(segment_name(writer, number), ("\n".join(lines) + "\n").encode())


def test_writers_are_merged_by_time_and_each_keeps_its_own_order(storage: FlakyStorage) -> None:
    """A clock that was set back does not turn one writer's facts around."""
    put(storage, "a", 0, 1.0, 5.0, 2.0)
    put(storage, "b", 0, 3.0, 6.0)
    assert whats(read_events(storage)) == ["a1", "b3", "a5", "a2", "b6"]


def test_half_written_and_foreign_files_are_no_segments(storage: FlakyStorage, tmp_path: Path) -> None:
    """Readers see complete segments only, whatever else lies in the folder."""
    put(storage, "a", 0, 1.0)
    folder = tmp_path / "run" / "events" / "a"
    for name in (".tmp-1234-5-6-abcd", "000001.jsonl.part", "000001.jsonl~", "notes.txt"):
        (folder / name).write_text('{"time": 2.0, "wri')
    assert whats(read_events(storage)) == ["a1"]
    assert whats(EventTail(storage).poll()) == ["a1"]


def test_a_damaged_segment_is_named(storage: FlakyStorage) -> None:
    """`read_events` raises with file and line; a tail goes on and keeps the name."""
    put(storage, "a", 0, 1.0)
    storage.create(segment_name("a", 1), b'{"time": 1.5, "writer": "a", "n": 1, "ki')
    put(storage, "a", 2, 2.0)
    with pytest.raises(IntegrityError, match=r"events/a/000001\.jsonl:1"):
        list(read_events(storage))
    tail = EventTail(storage)
    assert whats(tail.poll()) == ["a1", "a2"]
    assert len(tail.damaged) == 1
    assert "events/a/000001.jsonl:1" in tail.damaged[0]


def test_a_tail_reads_what_is_new(storage: FlakyStorage) -> None:
    """Each event comes once, also of a writer that appears later."""
    put(storage, "a", 0, 1.0)
    tail = EventTail(storage)
    assert whats(tail.poll()) == ["a1"]
    assert tail.poll() == []
    put(storage, "a", 1, 2.0)
    put(storage, "b", 0, 1.5)
    assert whats(tail.poll()) == ["b1.5", "a2"]
    assert tail.poll() == []


def test_a_first_look_at_a_long_run_is_cheap(storage: FlakyStorage) -> None:
    """With `newest`, only the first and that many newest segments of a writer are read."""
    for number in range(20):
        put(storage, "a", number, float(number))
    tail = EventTail(storage, newest=3)
    assert whats(tail.poll()) == ["a0", "a17", "a18", "a19"]
    put(storage, "a", 20, 20.0)
    assert whats(tail.poll()) == ["a20"]


def test_segments_beyond_six_digits_stay_in_order(storage: FlakyStorage) -> None:
    """Numbers order segments, not the text of their names."""
    put(storage, "a", 1_000_000, 2.0)
    put(storage, "a", 999_999, 1.0)
    assert whats(read_events(storage)) == ["a1", "a2"]
