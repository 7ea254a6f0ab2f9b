"""Opening a synchronizer: where it continues from, and what it says of files that are bad."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.state.outer_store import NEW_COUNTERS

pytestmark = pytest.mark.unit


def test_a_new_run_says_in_which_phase_it_begins(lab: Any) -> None:
    """The start record of a run with a warm-up is synchronous, of one without it outer."""
    for preset, phase in (("synchronous", "synchronous"), ("diloco", "outer")):
        synchronizer = lab.synchronizer(lab.job(preset=preset), folder=preset)
        first = synchronizer.store.log.last
        assert first.kind == "start"
        assert (first.body["phase"], first.body["versions"]) == (phase, [0])
        assert (first.body["total_sequences"], first.body["block_sequences"]) == (96, 16)
        assert synchronizer.snapshot().phase == phase


def test_everything_of_the_last_life_is_there(lab: Any) -> None:
    """Version, counters, generations, validations and what is committed go on."""
    job = lab.job(sequences=96, outer={"warmup": 0.25})
    finished = lab.run(job).finished(96)
    before, newest = finished.snapshot, finished.records[-1].body["counters"]
    synchronizer = lab.synchronizer(lab.job(sequences=144), epoch=2, total_sequences=144)
    view = synchronizer.snapshot()
    assert (view.version, view.digest, view.committed_sequences) == (before.version, before.digest, 96)
    assert view.validation == before.validation
    assert not view.finished
    exact = NEW_COUNTERS.keys() - {"wall_s", "cost"}
    assert {name: view.counters[name] for name in exact} == {name: before.counters[name] for name in exact}
    assert view.counters["wall_s"] >= newest["wall_s"] > 0
    for name in ("eu", "us"):
        assert synchronizer.join(lab.hello(job, name)) == 2  # generations go on over lives


def test_a_damaged_delta_is_named_and_its_work_is_redone(lab: Any) -> None:
    """One flipped byte in the newest delta: the run continues from the version before, and says so."""
    job = lab.job(sequences=96)
    before = lab.run(job, stop_when=lambda view: view.version >= 3)
    newest = before.snapshot.version
    (name,) = [n for n in before.storage.list("outer") if f"-v{newest:08d}-" in n]
    data = bytearray(before.storage.read(name))
    data[-1] ^= 1
    before.storage.write(name, bytes(data))
    run = lab.run(job).finished(96)
    fell_back = [event["name"] for event in run.events("fell_back")]
    assert name in fell_back
    resumed = next(record for record in run.records if record.kind == "resume")
    assert resumed.body["versions"] == [newest - 1]
