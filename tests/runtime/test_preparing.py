"""Before any island starts: corpus, identity, and whether anything is left to do."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.base.config import Fleet
from elastic.base.errors import RunFolderError
from elastic.base.resolve import resolve_job
from elastic.runtime.preparing import Prepared, prepare_run
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit


def _fleet() -> Fleet:
    islands = [
        {"name": "eu", "region": "eu", "price_per_worker_hour": 2.0},
        {"name": "us", "region": "us"},
    ]
    return Fleet.model_validate({"islands": islands})


def _prepare(lab: Any, job: Any, epoch: int = 1) -> Prepared:
    cache = str(lab.corpus.folder.parent)
    job = job.model_copy(update={"data": job.data.model_copy(update={"cache_folder": cache})})
    return prepare_run(Storage(lab.folder / "run"), _fleet(), resolve_job(job), epoch, lab)


def test_a_new_run_is_described(lab: Any) -> None:
    """Totals, blocks and prices are those that the synchronizer is told."""
    prepared = _prepare(lab, lab.job(sequences=100))
    assert (prepared.total_sequences, prepared.block_sequences) == (100, 16)
    assert (prepared.versions, prepared.committed, prepared.complete) == ((0,), 0, False)
    setup = prepared.setup(("eu",))
    assert setup == lab.setup(prepared.job, ("eu",), run=prepared.run, prices={"eu": 2.0})
    kinds = [kind for kind, _ in lab.facts]
    assert kinds[-2:] == ["data_ready", "run_started"]
    assert lab.facts[-1][1]["continued"] is False


def test_a_finished_run_has_nothing_left_to_do(lab: Any) -> None:
    """Finished, and finished under a smaller budget: complete. Under a larger one it goes on."""
    _prepare(lab, lab.job(sequences=48))
    done = lab.run(lab.job(sequences=48)).finished(48)
    same = _prepare(lab, lab.job(sequences=48), 2)
    assert same.complete
    assert (same.committed, same.versions, same.digest) == (48, done.snapshot.versions, done.snapshot.digest)
    assert same.validation == done.snapshot.validation
    assert _prepare(lab, lab.job(sequences=20), 3).complete
    larger = _prepare(lab, lab.job(sequences=96), 4)
    assert not larger.complete
    assert (larger.total_sequences, larger.committed) == (96, 48)
    assert lab.facts[-1][1]["continued"] is True


@pytest.mark.parametrize("preset", ["synchronous", "average"])
def test_a_finished_run_may_be_started_again_and_enlarged(lab: Any, preset: str) -> None:
    """Also a synchronous one, which never leaves its phase."""
    _prepare(lab, lab.job(sequences=48, preset=preset))
    lab.run(lab.job(sequences=48, preset=preset)).finished(48)
    assert _prepare(lab, lab.job(sequences=48, preset=preset), 2).complete
    assert not _prepare(lab, lab.job(sequences=96, preset=preset), 3).complete
    lab.run(lab.job(sequences=96, preset=preset)).finished(96)


def test_a_synchronous_run_may_be_continued_before_its_first_anchor(lab: Any) -> None:
    """Killed at version 0: the same command goes on."""
    job = lab.job(preset="synchronous")
    _prepare(lab, job)
    lab.synchronizer(job)
    assert _prepare(lab, job, 2).versions == (0,)


def test_nobody_goes_back_into_the_synchronous_phase(lab: Any) -> None:
    """After outer steps the islands' moments differ: `synchronous` is refused, with a way out."""
    _prepare(lab, lab.job(sequences=96))
    lab.run(lab.job(sequences=96), stop_when=lambda view: view.version >= 1)
    with pytest.raises(RunFolderError, match=r"outer\.preset.*cannot go back"):
        _prepare(lab, lab.job(sequences=96, preset="synchronous"), 2)


def test_a_budget_below_what_was_trained_is_refused(lab: Any) -> None:
    """An unfinished run cannot shrink under what it has committed; the message says how far it may."""
    _prepare(lab, lab.job(sequences=96))
    run = lab.run(lab.job(sequences=96), stop_when=lambda view: view.version >= 2)
    last = max(stop for record in run.steps for _, stop in record.body["committed"])
    with pytest.raises(RunFolderError) as caught:
        _prepare(lab, lab.job(sequences=last - 1), 2)
    assert f"budget.tokens of at least {last * 16}" in str(caught.value)
    assert _prepare(lab, lab.job(sequences=last), 3).total_sequences == last


def test_blocks_stay_what_they_were(lab: Any) -> None:
    """The size of a lease is fixed by the first record, whatever later code would choose."""
    job = lab.job()
    _prepare(lab, job)
    lab.synchronizer(job, block_sequences=12)
    assert _prepare(lab, job, 2).block_sequences == 12
