"""A run in one process: the real worker and synchronizer code, islands as threads, no Ray.

For benchmarks of the outer loop, for tests, and for looking into it with a debugger. Faults of
processes and networks need a real cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from elastic.base.config import Job
from elastic.base.errors import DeadlineError
from elastic.base.resolve import resolve_job
from elastic.exchange.link import Snapshot
from elastic.policy.plan import block_sequences, total_sequences
from elastic.runtime.board import RunSetup
from elastic.runtime.island_loop import run_island
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.island_store import IslandStore
from elastic.runtime.opening import open_synchronizer
from elastic.runtime.synchronizer import Synchronizer
from elastic.runtime.versions import library_versions
from elastic.state.lock import RunLock
from elastic.state.storage import Storage
from elastic.training.corpus import Corpus
from elastic.training.group import Group
from elastic.training.inner import Inner
from elastic.training.model import build_model
from elastic.views.event_log import EventLog


@dataclass
class InProcessRun:
    """What came out of one life of a run."""

    endings: dict[str, str] = field(default_factory=dict)
    """done or stopped, by island."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """The last error of each island that raised one."""
    snapshot: Snapshot | None = None


def run_in_process(
    job: Job,
    corpus_folder: Path | str,
    storage: Storage,
    islands: tuple[str, ...] = ("eu", "us"),
    *,
    stop_when: Callable[[Snapshot], bool] | None = None,
    tamper: Mapping[str, Callable[[IslandRank], None]] | None = None,
    restarts: int = 0,
    timeout_s: float = 600.0,
) -> InProcessRun:
    """Run or continue `job` on the prepared corpus in `corpus_folder` until done.

    `stop_when` is asked about every tenth of a second and ends the run resumably. `tamper` changes an
    island's rank before it starts, to bring trouble. An island that raises is declared lost and started
    again, at most `restarts` times. Raises DeadlineError after `timeout_s`.
    """
    job = resolve_job(job).value
    corpus = Corpus.open(Path(corpus_folder))
    lock = RunLock(storage)
    epoch = lock.acquire(takeover_s=1.0)
    setup = RunSetup(
        job=job,
        run=job.name,
        epoch=epoch,
        islands=tuple(sorted(islands)),
        total_sequences=total_sequences(job, len(corpus.train)),
        block_sequences=block_sequences(job),
        validation_sequences=len(corpus.validation),
        tokens_per_byte=corpus.info.validation.tokens_per_byte,
        vocab_size=corpus.info.vocab_size,
    )
    outcome = InProcessRun()
    with EventLog(storage, f"synchronizer-a{epoch}") as events:
        synchronizer = open_synchronizer(setup, storage, events)
        places = [
            _Place(name, setup, corpus, storage, synchronizer, outcome, (tamper or {}).get(name), restarts)
            for name in setup.islands
        ]
        threads = [threading.Thread(target=place.run, name=place.name, daemon=True) for place in places]
        try:
            for thread in threads:
                thread.start()
            _watch(synchronizer, threads, stop_when, timeout_s)
        finally:
            synchronizer.close()
            outcome.snapshot = synchronizer.snapshot()
    lock.release()
    return outcome


def _watch(
    synchronizer: Synchronizer,
    threads: list[threading.Thread],
    stop_when: Callable[[Snapshot], bool] | None,
    timeout_s: float,
) -> None:
    deadline, stopping = time.monotonic() + timeout_s, False
    while any(thread.is_alive() for thread in threads):
        if stop_when is not None and not stopping and stop_when(synchronizer.snapshot()):
            synchronizer.stop("stop_when")
            stopping = True
        if time.monotonic() > deadline:
            raise DeadlineError(
                "the run did not end in time", saw=f"timeout_s = {timeout_s:g}, {synchronizer.snapshot()}"
            )
        time.sleep(0.1 if stop_when is None else 0.02)


@dataclass
class _Place:
    """Where one island lives: a thread, and what its incarnations are made of."""

    name: str
    setup: RunSetup
    corpus: Corpus
    storage: Storage
    synchronizer: Synchronizer
    outcome: InProcessRun
    tamper: Callable[[IslandRank], None] | None
    restarts: int

    def run(self) -> None:
        """One incarnation after the other, until one ends in order or too many have failed."""
        torch.set_num_threads(1)  # per thread: islands share the cores
        for start in range(self.restarts + 1):
            try:
                self.outcome.endings[self.name] = self._live(start)
                return
            except Exception as error:  # the caller looks at it, as the controller does under Ray
                if self.outcome.snapshot is not None:
                    return  # the run ended at its deadline; nobody looks any more
                self.outcome.errors[self.name] = error
                self.synchronizer.declare_lost(self.name, f"{type(error).__name__}: {error}")

    def _live(self, start: int) -> str:
        job = self.setup.job
        with EventLog(self.storage, f"island-{self.name}-a{self.setup.epoch}-{start}") as events:
            model = build_model(job.model, self.setup.vocab_size, job.data.seq_len, job.seed)
            rank = IslandRank(
                name=self.name,
                job=job,
                link=self.synchronizer,
                group=Group(),
                inner=Inner(model, job.inner),
                corpus=self.corpus,
                events=events,
                versions=library_versions(),
                device="cpu",
            )
            rank.store = IslandStore(
                self.storage,
                self.name,
                rank.group,
                rank.parameters,
                events,
                epoch=self.setup.epoch,
                keep=job.checkpoint.keep,
            )
            if self.tamper is not None:
                self.tamper(rank)
            return run_island(rank)
