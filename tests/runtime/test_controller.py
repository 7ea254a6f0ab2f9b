"""The controller's decisions and its end, without a cluster."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.base.config import Fleet
from elastic.base.errors import LockHeldError, ResumableError, RunFolderError
from elastic.base.resolve import resolve_fleet, resolve_job
from elastic.exchange.link import Snapshot
from elastic.runtime import controller
from elastic.runtime.controller import Attempt, decide, wind_down
from elastic.runtime.preparing import prepare_run
from elastic.runtime.result import read_result
from elastic.runtime.run_folder import LockKeeper
from elastic.runtime.signals import StopSignals
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog, read_events

pytestmark = pytest.mark.unit

VIEW = Snapshot(
    phase="outer",
    version=3,
    counters={"wall_s": 1800.0, "cost": 2.0},
    total_sequences=96,
    committed_sequences=48,
    live=("eu", "us"),
    joined=("eu", "us"),
)
FLEET = Fleet.model_validate({"islands": [{"name": "eu", "region": "eu"}, {"name": "us", "region": "us"}]})


class Islands:
    """Islands that end when they are told to."""

    def __init__(self, ended: bool = False) -> None:
        self.ended, self.waits = ended, 0

    def all_ended(self, names: Any = None) -> bool:
        return self.ended

    def wait(self, timeout_s: float) -> None:
        self.waits += 1

    def endings(self, view: Snapshot) -> list[Any]:
        return []


@pytest.fixture
def attempt(lab: Any) -> Iterator[Attempt]:
    """An attempt on a run folder of its own, with a clock that the test moves."""
    storage = Storage(lab.folder / "run")
    lock = LockKeeper(storage)
    with EventLog(storage, "controller-a1") as events:
        yield Attempt(lab.job(), FLEET, storage, lock, events, StopSignals(), clock=lambda: 0.0)
    lock.release()


def _with_budget(attempt: Attempt, **budget: Any) -> Attempt:
    job = attempt.job.model_copy(update={"budget": attempt.job.budget.model_copy(update=budget)})
    return dataclasses.replace(attempt, job=job)


def test_nothing_ends_a_healthy_run(attempt: Attempt) -> None:
    """Neither a finished run whose islands still leave, nor one within its limits."""
    assert decide(attempt, VIEW, Islands()) is None  # type: ignore[arg-type]
    assert decide(attempt, dataclasses.replace(VIEW, finished=True), Islands()) is None  # type: ignore[arg-type]
    within = _with_budget(attempt, max_hours=0.6, max_cost=2.5)
    assert decide(within, VIEW, Islands()) is None  # type: ignore[arg-type]


def test_a_run_is_done_when_its_islands_have_left(attempt: Attempt) -> None:
    """Exit code 0; islands that do not leave are waited for, but not for ever."""
    finished = dataclasses.replace(VIEW, finished=True)
    over = decide(attempt, finished, Islands(ended=True))  # type: ignore[arg-type]
    assert (over.status, over.exit_code) == ("done", 0)  # type: ignore[union-attr]
    now = [1.0]
    patient = dataclasses.replace(attempt, clock=lambda: now[0])
    assert decide(patient, finished, Islands()) is None  # type: ignore[arg-type]
    now[0] += controller.END_GRACE_S + 1
    assert decide(patient, finished, Islands()).status == "done"  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"failure": "bucket away", "storage_failed": True}, "stopped", 75),
        ({"failure": "MergeError: rows missing"}, "failed", 1),
    ],
)
def test_a_synchronizer_that_cannot_go_on_ends_the_run(
    attempt: Attempt, change: dict[str, Any], status: str, code: int
) -> None:
    """Storage that stays away is resumable, anything else is a bug; the reason is passed on."""
    over = decide(attempt, dataclasses.replace(VIEW, **change), Islands())  # type: ignore[arg-type]
    assert (over.status, over.exit_code) == (status, code)  # type: ignore[union-attr]
    assert change["failure"] in over.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("budget", [{"max_hours": 0.5}, {"max_cost": 2.0}])
def test_a_budget_stops_the_run_resumably(attempt: Attempt, budget: dict[str, float]) -> None:
    """`max_hours` and `max_cost` end a run with exit code 75."""
    over = decide(_with_budget(attempt, **budget), VIEW, Islands())  # type: ignore[arg-type]
    assert (over.status, over.exit_code) == ("stopped", 75)  # type: ignore[union-attr]


def test_a_signal_stops_the_run_with_its_code(attempt: Attempt) -> None:
    """SIGTERM gives 143, and the reason names it."""
    attempt.signals.received = signal.SIGTERM
    over = decide(attempt, VIEW, Islands())  # type: ignore[arg-type]
    assert (over.status, over.exit_code) == ("stopped", 143)  # type: ignore[union-attr]
    assert "stopped by SIGTERM" in over.reason  # type: ignore[union-attr]


def test_a_signal_that_takes_ray_down_too_is_still_a_stop(attempt: Attempt) -> None:
    """A signal to the whole process group ends our Ray under us: 143, not an error; without one it is 75."""
    died = ResumableError("the synchronizer died")
    over = controller._over_with(attempt, died)
    assert (over.status, over.exit_code, over.error) == ("stopped", 75, died)
    attempt.signals.received = signal.SIGTERM
    over = controller._over_with(attempt, died)
    assert (over.status, over.exit_code, over.error) == ("stopped", 143, None)


def test_a_lost_lock_ends_the_attempt(attempt: Attempt) -> None:
    """Another driver writes the run: this one must not."""
    attempt.lock.lost = "epoch 2 is held by another"
    with pytest.raises(LockHeldError, match="epoch 2"):
        decide(attempt, VIEW, Islands())  # type: ignore[arg-type]
    attempt.lock.lost = ""


def test_winding_down_does_not_wait_for_ever(attempt: Attempt) -> None:
    """Islands that do not save themselves in time are named in a warning; the run ends."""
    now = iter(range(0, 1000, 4))
    slow = dataclasses.replace(attempt, clock=lambda: float(next(now)), last=VIEW)
    asked: list[str] = []
    synchronizer = SimpleNamespace(stop=asked.append, look=lambda: (VIEW, []))
    islands = Islands()
    over = controller.Over("stopped", 75, "max_hours")
    wind_down(slow, synchronizer, islands, over)  # type: ignore[arg-type]
    assert asked == ["max_hours"]
    assert 1 <= islands.waits <= 5
    attempt.events.flush()
    kinds = [event["kind"] for event in read_events(attempt.storage)]
    assert kinds == ["run_stopping", "warning"]


# ------------------------------------------------------------------------------ from end to end


def _train(lab: Any, job: Any) -> Any:
    cache = str(lab.corpus.folder.parent)
    job = job.model_copy(update={"data": job.data.model_copy(update={"cache_folder": cache})})
    return controller.train(resolve_job(job), resolve_fleet(FLEET))


def _finish(lab: Any, sequences: int = 48) -> Any:
    """A finished run in `lab.folder / "run"`, as a controller would have left it."""
    cache = str(lab.corpus.folder.parent)
    job = lab.job(sequences=sequences)
    kept = job.model_copy(update={"data": job.data.model_copy(update={"cache_folder": cache})})
    prepare_run(Storage(lab.folder / "run"), resolve_fleet(FLEET).value, resolve_job(kept), 1, lab)
    return lab.run(job).finished(sequences)


def test_a_finished_run_is_done_at_once(lab: Any) -> None:
    """No cluster is started, nothing is rewritten, exit code 0; the first result is kept from then on."""
    run = _finish(lab)
    records = [record.name for record in run.records]
    result = _train(lab, lab.job(sequences=48))
    assert (result.status, result.exit_code) == ("done", 0)
    assert "nothing to do" in result.reason
    assert (result.committed_sequences, result.total_sequences) == (48, 48)
    assert result.final_val_loss == run.snapshot.validation["loss"]
    assert (result.versions, result.digest) == ([run.snapshot.version], run.snapshot.digest)
    assert result.outer_steps == run.snapshot.counters["outer_steps"]
    first = read_result(run.storage)
    assert first == result.to_json()
    smaller = _train(lab, lab.job(sequences=20))
    assert smaller.exit_code == 0
    assert read_result(run.storage) == first
    assert [record.name for record in run.records] == records


def test_another_job_is_refused_and_the_result_is_kept(lab: Any) -> None:
    """Exit code 2, the differences in the message, and result.json as it was; the lock is free again."""
    run = _finish(lab)
    _train(lab, lab.job(sequences=48))
    first = read_result(run.storage)
    with pytest.raises(RunFolderError, match="seed: 0 in the run, 3 now"):
        _train(lab, lab.job(sequences=48, seed=3))
    assert read_result(run.storage) == first
    LockKeeper(run.storage).release()
    (ended,) = [e for e in run.events("run_ended") if e["exit_code"] == 2]
    assert ended["status"] == "failed"


def test_a_result_is_written_when_preparing_fails(lab: Any) -> None:
    """A missing source: the error goes on its way, and result.json says what it was."""
    job = lab.job().model_copy(update={"run_folder": str(lab.folder / "run")})
    job = job.model_copy(update={"data": job.data.model_copy(update={"sources": ["/nowhere/at/all.txt"]})})
    with pytest.raises(Exception, match="nowhere"):
        controller.train(resolve_job(job), resolve_fleet(FLEET))
    there = read_result(Storage(lab.folder / "run"))
    assert there is not None
    assert (there["status"], there["exit_code"]) == ("failed", 2)
