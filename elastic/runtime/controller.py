"""The controller of a run: observe, decide, act, record. Read it top to bottom.

`train` opens the run folder, prepares the corpus, connects to the cluster, starts the synchronizer
and the islands, watches them until the run is over, ends them in order, and always leaves a
result.json. Decisions come from `elastic.policy`; what happened goes out as events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from elastic.base.config import Fleet, Job
from elastic.base.errors import EXIT_BUG, EXIT_DONE, EXIT_RESUMABLE, ElasticError, LockHeldError
from elastic.base.known import known
from elastic.base.resolve import Resolved
from elastic.exchange.link import Snapshot
from elastic.policy.cost import over_budget
from elastic.policy.recovery import Stop
from elastic.runtime import cluster
from elastic.runtime.board import RunSetup
from elastic.runtime.islands import Islands
from elastic.runtime.metrics import RayMetrics
from elastic.runtime.preparing import Prepared, prepare_run
from elastic.runtime.result import Result, read_result
from elastic.runtime.run_folder import LockKeeper, open_storage
from elastic.runtime.signals import Interrupted, StopSignals
from elastic.runtime.synchronizer_handle import SynchronizerHandle
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog

LOOK_EVERY_S = 0.5
STOP_GRACE_S = 15.0
"""How long islands may take to save themselves after a stop signal."""
END_GRACE_S = 60.0
"""How long islands may take to leave a finished run."""
Listener = Callable[[dict[str, Any]], None]


@dataclass
class Attempt:
    """One life of the driver."""

    job: Job
    fleet: Fleet
    storage: Storage
    lock: LockKeeper
    events: EventLog
    signals: StopSignals
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    prepared: Prepared | None = None
    last: Snapshot | None = None
    finished_at: float | None = None

    def warn(self, what: str) -> None:
        """Something deserves a look."""
        self.events.emit("warning", {"what": what})

    def waited_for_islands(self, grace_s: float) -> bool:
        """Whether the run has been finished for so long that islands must have left by now."""
        self.finished_at = self.finished_at or self.clock()
        return self.clock() - self.finished_at > grace_s


@dataclass(frozen=True)
class Over:
    """Why and how the run ends."""

    status: str
    exit_code: int
    reason: str = ""
    error: BaseException | None = None


def train(
    job: Resolved[Job],
    fleet: Resolved[Fleet],
    *,
    signals: StopSignals | None = None,
    listeners: Callable[[Storage], Sequence[Listener]] = lambda storage: (),
    in_ray_job: bool = False,
) -> Result:
    """Run or continue a job until it is done, stopped or failed; the result is in the run folder too.

    `signals`, if given, takes over ctrl-C and SIGTERM (main thread only); `listeners(storage)` are
    given every event as it happens. Raises ElasticError for
    whatever makes the run impossible before it has begun.
    """
    storage = open_storage(job.value, fleet.value, in_ray_job)
    lock = LockKeeper(storage)
    events = EventLog(storage, f"controller-a{lock.epoch}")
    attempt = Attempt(job.value, fleet.value, storage, lock, events, signals or StopSignals())
    try:
        for listener in listeners(storage):
            events.add_listener(listener)
        over = _run(attempt, job)
    except Interrupted:
        over = _stopped(attempt)
    except KeyboardInterrupt as error:
        over = Over("stopped", 130, "interrupted while starting or ending", error)
    except Exception as error:
        over = _over_with(attempt, error)
    return _end(attempt, over)


def _run(attempt: Attempt, job: Resolved[Job]) -> Over:
    """Everything between the lock and the result."""
    attempt.prepared = prepared = prepare_run(
        attempt.storage, attempt.fleet, job, attempt.lock.epoch, attempt.events, attempt.signals.check
    )
    if prepared.complete:
        return Over("done", EXIT_DONE, prepared.nothing_to_do)
    attempt.signals.check()
    attempt.events.emit("cluster", {"what": cluster.announcement(attempt.fleet)})
    with cluster.connected(attempt.fleet, attempt.signals, attempt.warn):
        cluster.check_shared(attempt.storage)
        islands = Islands(
            attempt.fleet, cluster.nodes(), prepared, attempt.storage, attempt.lock.epoch, attempt.events
        )
        with _synchronizer(attempt, prepared.setup(islands.names)) as synchronizer:
            islands.start_all(synchronizer.actor)
            try:
                over = watch(attempt, synchronizer, islands)
                if over.status == "stopped":
                    wind_down(attempt, synchronizer, islands, over)
                return over
            finally:
                islands.end_all()
                close(attempt, synchronizer)


def watch(attempt: Attempt, synchronizer: SynchronizerHandle, islands: Islands) -> Over:
    """Observe, decide, act, record, until something ends the run."""
    metrics = RayMetrics(attempt.job.name)
    started = attempt.clock()
    while True:
        # observe
        islands.wait(LOOK_EVERY_S)
        view, events = synchronizer.look()
        endings = islands.endings(view)
        # record
        attempt.last = view
        for event in events:
            attempt.events.tell(event)
        metrics.update(view)
        # decide
        over = decide(attempt, view, islands)
        decisions = [(name, *islands.decide(name, ending)) for name, ending in endings]
        # act
        for name, ending, decision in decisions:
            synchronizer.declare_lost(name, ending.what or ending.kind)
            if isinstance(decision, Stop):
                over = over or Over(
                    "stopped" if decision.exit_code == 75 else "failed", decision.exit_code, decision.reason
                )
        if over is not None:
            return over
        islands.restart_due(synchronizer.actor)
        if (
            len(view.joined) < len(islands.names)
            and attempt.clock() - started > attempt.fleet.start_timeout_s
        ):
            if len(view.joined) < known(attempt.fleet.min_islands):
                raise islands.late(view.joined)
            synchronizer.begin()


def decide(attempt: Attempt, view: Snapshot, islands: Islands) -> Over | None:
    """What ends a run, apart from an island's own ending."""
    if view.finished and (islands.all_ended() or attempt.waited_for_islands(END_GRACE_S)):
        return Over("done", EXIT_DONE)
    if view.failure:
        code = 75 if view.storage_failed else 1
        return Over("stopped" if code == 75 else "failed", code, f"the synchronizer stopped: {view.failure}")
    if attempt.signals.received:
        return _stopped(attempt)
    if attempt.lock.lost:
        raise LockHeldError(attempt.lock.lost)
    spent = over_budget(attempt.job.budget, view.counters["wall_s"] / 3600.0, view.counters["cost"])
    if spent is not None:
        return Over("stopped", spent.exit_code, spent.reason)
    return None


def wind_down(attempt: Attempt, synchronizer: SynchronizerHandle, islands: Islands, over: Over) -> None:
    """Let the islands that take part save themselves, within `STOP_GRACE_S`; others have nothing to save."""
    received = attempt.signals.received
    saving = attempt.last.live if attempt.last else ()
    attempt.events.emit("run_stopping", {"reason": over.reason, "signal": received.name if received else ""})
    synchronizer.stop(over.reason)
    deadline = attempt.clock() + STOP_GRACE_S
    while not islands.all_ended(saving) and attempt.clock() < deadline:
        islands.wait(LOOK_EVERY_S)
        view, events = synchronizer.look()
        islands.endings(view)
        attempt.last = view
        for event in events:
            attempt.events.tell(event)
    if not islands.all_ended(saving):
        what = f"not every island saved itself within {STOP_GRACE_S:g} s; their last checkpoints stand"
        attempt.events.emit("warning", {"what": what})


def close(attempt: Attempt, synchronizer: SynchronizerHandle) -> None:
    """The synchronizer's last figures and events; what matters of the run is durable already."""
    try:
        attempt.last = synchronizer.close()
        _, events = synchronizer.look()
        for event in events:
            attempt.events.tell(event)
    except (ElasticError, OSError) as error:
        attempt.events.emit("warning", {"what": f"the synchronizer did not close in order: {error}"})


@contextlib.contextmanager
def _synchronizer(attempt: Attempt, setup: RunSetup) -> Iterator[SynchronizerHandle]:
    """The synchronizer's actor, for as long as the block lasts."""
    handle = SynchronizerHandle(attempt.fleet, setup, attempt.storage)
    try:
        handle.open(attempt.signals.check)
        yield handle
    finally:
        handle.kill()


def _over_with(attempt: Attempt, error: Exception) -> Over:
    """How an error ends the run.

    A signal to the whole process group ends a Ray of our own under us, or while it starts: what then
    goes wrong is part of a stop, not a failure. Errors that no retry mends stay what they are.
    """
    ours = isinstance(error, ElasticError)
    code = error.exit_code if isinstance(error, ElasticError) else EXIT_BUG
    reason = str(error) if ours else f"{type(error).__name__}: {error}"
    if attempt.signals.received and (code == EXIT_RESUMABLE or not ours):
        attempt.warn(f"stopping was cut short, the last checkpoints stand: {reason}")
        return _stopped(attempt)
    return Over("stopped" if code == EXIT_RESUMABLE else "failed", code, reason, error)


def _stopped(attempt: Attempt) -> Over:
    name = attempt.signals.received.name if attempt.signals.received else ""
    return Over("stopped", attempt.signals.exit_code, f"stopped by {name}")


def _end(attempt: Attempt, over: Over) -> Result:
    """The last event, result.json, the lock; then the error, if there was one, goes on its way."""
    result = _result(attempt, over)
    problems: list[BaseException] = []
    fields = {"status": over.status, "exit_code": over.exit_code, "reason": over.reason}
    for step in (
        lambda: attempt.events.emit("run_ended", fields),
        attempt.events.close,
        lambda: None if _keeps_its_result(attempt) else result.write(attempt.storage),
        attempt.lock.release,
    ):
        try:
            step()
        except Exception as error:  # every step is tried; the first problem is raised below
            problems.append(error)
    if over.error is not None:
        raise over.error
    if problems:
        raise problems[0]
    return result


def _keeps_its_result(attempt: Attempt) -> bool:
    """A finished run that was started again, or one that refused a wrong job, keeps the result it has."""
    untouched = attempt.prepared is None or attempt.prepared.complete
    return untouched and read_result(attempt.storage) is not None


def _result(attempt: Attempt, over: Over) -> Result:
    """What the run came to, from the last look at the synchronizer or from the records."""
    prepared, view = attempt.prepared, attempt.last
    counters = dict(view.counters if view else prepared.counters if prepared else {})
    validation = dict(view.validation if view else prepared.validation if prepared else {})
    final = validation if validation.get("final") else {}
    whole = {name: int(counters.get(name, 0)) for name in _WHOLE}
    return Result(
        status=over.status,
        exit_code=over.exit_code,
        reason=over.reason,
        run=prepared.run if prepared else "",
        run_folder=attempt.storage.url,
        attempt=attempt.lock.epoch,
        islands=len(view.joined) if view else prepared.islands if prepared else 0,
        committed_sequences=view.committed_sequences if view else prepared.committed if prepared else 0,
        total_sequences=prepared.total_sequences if prepared else 0,
        final_val_loss=final.get("loss"),
        final_val_nats_per_byte=final.get("nats_per_byte"),
        validation_bytes=prepared.info.validation.bytes if prepared else 0,
        versions=list(view.versions if view else prepared.versions if prepared else (0,)),
        digest=view.digest if view else prepared.digest if prepared else "",
        hours=counters.get("wall_s", 0.0) / 3600.0,
        cost=counters.get("cost", 0.0),
        wall_s=attempt.clock() - attempt.began,
        started=attempt.started,
        ended=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **whole,
    )


_WHOLE = (
    "outer_steps",
    "synchronous_steps",
    "committed_tokens",
    "replayed_sequences",
    "bytes_up",
    "bytes_down",
    "bytes_up_warmup",
    "bytes_down_warmup",
)
