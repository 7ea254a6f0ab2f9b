"""How a run is doing, rebuilt from its run folder alone.

Nothing here asks the driver: the run file, the newest state record, the events, the lock and the result
are read. Whether the driver lives cannot be told by one look, since no clock of two hosts is compared;
a reader that looks again and again sees whether the lock's counter moves.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from elastic.base.errors import IntegrityError, RunFolderError
from elastic.state import layout
from elastic.state.records import Record, parse_record
from elastic.state.run_file import read_run
from elastic.views.describe import describe, preparing_text
from elastic.views.event_log import Event, EventTail, plain
from elastic.views.format import integer, number, one_line
from elastic.views.progress import IslandProgress, Progress, Validation, validation_of

if TYPE_CHECKING:
    from elastic.state.storage import Storage

NO_HEARTBEAT_S = 20.0
"""A counter that stands still for this long, while we watch, is called `no heartbeat`."""

NEWEST_SEGMENTS = 64
KEPT_WARNINGS = 20
WARNING_KINDS = ("warning", "fell_back", "refused", "data_changed", "island_lost")


@dataclass(frozen=True)
class RunStatus:
    """What the folder says. Counters are totals of the run over all attempts."""

    run: str
    url: str
    state: str
    """`running`, `no heartbeat`, `stopped`, `done` or `failed`."""
    attempt: int
    exit_code: int | None
    """Of the last attempt, None while it runs or if it was killed."""
    reason: str
    preparing: str
    """How far the corpus is, empty when it is ready."""
    phase: str
    progress: float
    """Committed share of the budget, 0 to 1."""
    committed_sequences: int
    total_sequences: int
    committed_tokens: int
    replayed_sequences: int
    outer_steps: int
    synchronous_steps: int
    versions: list[int]
    """Newest durable version of each fragment."""
    bytes_up: int
    bytes_down: int
    bytes_up_warmup: int
    bytes_down_warmup: int
    validation: Validation | None
    left_s: float | None
    """Seconds left at the run's mean speed over all attempts, None if not running or not known."""
    last_event: str
    last_event_writer: str
    last_event_age_s: float | None
    """Between the writer's clock and this host's: for people, not for decisions."""
    islands: list[IslandProgress] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """The newest ones, oldest first."""

    @property
    def over(self) -> bool:
        """No attempt is under way."""
        return self.state in ("done", "stopped", "failed")

    def to_json(self) -> dict[str, Any]:
        """Field names as they are here; they are stable (docs/reference/cli-json.md)."""
        return {key: plain(value) for key, value in asdict(self).items()}


class StatusReader:
    """Reads one run folder; later calls of `read` read only what is new.

    `wall_clock` gives ages for people; `clock` (monotonic) says how long the counter of the lock has
    stood still while this reader watched. Raises RunFolderError (exit 2) if there is no run.
    """

    def __init__(
        self,
        storage: Storage,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._wall_clock, self._clock = storage, wall_clock, clock
        self._tail = EventTail(storage, newest=NEWEST_SEGMENTS)
        self._progress = Progress()
        self._warnings: deque[str] = deque(maxlen=KEPT_WARNINGS)
        self._last: Event = {}
        self._first_record: Record | None = None
        self._newest_record: Record | None = None
        self._beat: object = None
        self._beat_moved_s = clock()

    def read(self) -> RunStatus:
        """The status now."""
        run_file = read_run(self._storage)
        if run_file is None and not self._storage.list(layout.LOCK):
            raise no_run_error(self._storage)
        for event in self._tail.poll():
            self._progress.update(event)
            self._last = event
            if event["kind"] in WARNING_KINDS:
                self._warnings.append(describe(event) or "")
        self._read_records()
        result = self._json(layout.RESULT_FILE) or {}
        state = self._state(result)
        return self._status(run_file or {}, result if state == result.get("status") else {}, state)

    # ------------------------------------------------------------------------------- parts

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            found = json.loads(self._storage.read(name))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise IntegrityError("not JSON", where=name, saw=str(error)) from error
        return found if isinstance(found, dict) else {}

    def _read_records(self) -> None:
        """The first record and the newest one that can be read; a damaged newest one is a warning."""
        names = self._storage.list(layout.RECORDS)
        keys = sorted((key, name) for name in names if (key := layout.parse_record_name(name)))
        if keys and self._first_record is None:
            self._first_record = self._record(keys[0][1])
        for _, name in reversed(keys):
            if self._newest_record is not None and self._newest_record.name == name:
                return
            record = self._record(name)
            if record is not None:
                self._newest_record = record
                return

    def _record(self, name: str) -> Record | None:
        try:
            return parse_record(name, self._storage.read(name))
        except (IntegrityError, FileNotFoundError) as error:
            warning = f"a state record is bad: {one_line(error)}"
            if warning not in self._warnings:
                self._warnings.append(warning)
            return None

    def _state(self, result: dict[str, Any]) -> str:
        epochs = (layout.parse_lock_name(name) for name in self._storage.list(layout.LOCK))
        epoch = max((epoch for epoch in epochs if epoch is not None), default=0)
        beat = self._json(layout.beat_name(epoch)) or {} if epoch else {}
        if (epoch, beat) != self._beat:
            self._beat, self._beat_moved_s = (epoch, beat), self._clock()
        # A newer lock than the events know: an attempt that has not written its first events yet.
        newer = 0 < self._progress.epoch < epoch and not beat.get("released")
        if result and not newer and integer(result.get("attempt")) >= self._progress.attempt:
            return str(result.get("status"))
        if self._progress.ended is not None and not newer:
            return self._progress.ended
        if beat.get("released"):
            return "stopped"
        silent_s = self._clock() - self._beat_moved_s
        return "no heartbeat" if silent_s >= NO_HEARTBEAT_S else "running"

    def _status(self, run_file: dict[str, Any], result: dict[str, Any], state: str) -> RunStatus:
        progress = self._progress
        body = self._newest_record.body if self._newest_record else {}
        start = self._first_record.body if self._first_record else {}
        counters = body.get("counters", {})

        def total(name: str) -> int:
            """Each source is a running total; the highest is the newest."""
            return max(
                integer(source.get(name)) for source in (result, counters, start, _as_mapping(progress))
            )

        seq_len = integer(run_file.get("seq_len"))
        committed, sequences = total("committed_sequences"), total("total_sequences")
        if seq_len:
            committed = max(committed, total("committed_tokens") // seq_len)
        share = committed / sequences if sequences else 0.0
        wall_s = number(counters.get("wall_s"))
        running = state == "running" and share > 0 and wall_s is not None
        age_s = self._wall_clock() - (number(self._last.get("time")) or 0.0) if self._last else None
        return RunStatus(
            run=str(run_file.get("run") or progress.run or _job_name(run_file) or self._storage.url),
            url=self._storage.url,
            state=state,
            attempt=max(progress.attempt, integer(result.get("attempt"))),
            exit_code=integer(result["exit_code"]) if "exit_code" in result else None,
            reason=str(result.get("reason") or ""),
            preparing=preparing_text(progress) if state == "running" else "",
            phase=str(body.get("phase") or progress.phase),
            progress=round(share, 6),
            committed_sequences=committed,
            total_sequences=sequences,
            committed_tokens=total("committed_tokens"),
            replayed_sequences=total("replayed_sequences"),
            outer_steps=total("outer_steps"),
            synchronous_steps=total("synchronous_steps"),
            versions=[integer(version) for version in body.get("versions", [])]
            or [version for _, version in sorted(progress.versions.items())],
            bytes_up=total("bytes_up"),
            bytes_down=total("bytes_down"),
            bytes_up_warmup=total("bytes_up_warmup"),
            bytes_down_warmup=total("bytes_down_warmup"),
            validation=progress.validation or _recorded_validation(body),
            left_s=round((wall_s or 0.0) * (1 - share) / share, 1) if running else None,
            last_event=str(self._last.get("kind", "")),
            last_event_writer=str(self._last.get("writer", "")),
            last_event_age_s=None if age_s is None else round(age_s, 1),
            islands=list(progress.islands.values()),
            warnings=[*self._warnings, *self._tail.damaged],
        )


def _as_mapping(progress: Progress) -> dict[str, object]:
    return {entry.name: getattr(progress, entry.name) for entry in fields(progress)}


def _job_name(run_file: dict[str, Any]) -> str:
    job = run_file.get("job")
    return str(job.get("name", "")) if isinstance(job, dict) else ""


def _recorded_validation(body: dict[str, Any]) -> Validation | None:
    last = body.get("validation")
    found = last[-1] if isinstance(last, list) and last else last
    return validation_of(found) if isinstance(found, dict) else None


def no_run_error(storage: Storage) -> RunFolderError:
    """The error for a folder without a run; names a run folder below it, if there is one."""
    folder = storage.path()
    below = sorted(path.parent for path in folder.glob(f"*/{layout.RUN_FILE}")) if folder else []
    fix = "give the run folder of a job: its run_folder, or runs/<job name>"
    if below:
        fix = f"did you mean {below[0]}?"
    return RunFolderError("no run here", where=storage.url, saw=f"{layout.RUN_FILE} is not there", fix=fix)
