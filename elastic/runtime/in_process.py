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
    snapshot: Snapshot | None = None


def run_in_process(
    job: Job,
    corpus_folder: Path | str,
    storage: Storage,
    islands: tuple[str, ...] = ("eu", "us"),
    *,
    stop_when: Callable[[Snapshot], bool] | None = None,
    tamper: Mapping[str, Callable[[IslandRank], None]] | None = None,
    timeout_s: float = 600.0,
) -> InProcessRun:
    """Run or continue `job` on the prepared corpus in `corpus_folder` until done.

    `stop_when` is asked about every tenth of a second and ends the run resumably. `tamper` changes an
    island's rank before it starts, to bring trouble. Raises DeadlineError after `timeout_s`.
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
        threads = [
            threading.Thread(
                target=_island,
                args=(name, job, corpus, storage, epoch, synchronizer, outcome, (tamper or {}).get(name)),
                daemon=True,
            )
            for name in setup.islands
        ]
        try:
            for thread in threads:
                thread.start()
            _watch(synchronizer, threads, outcome, stop_when, timeout_s)
        finally:
            synchronizer.close()
            outcome.snapshot = synchronizer.snapshot()
    lock.release()
    return outcome


def _watch(
    synchronizer: Synchronizer,
    threads: list[threading.Thread],
    outcome: InProcessRun,
    stop_when: Callable[[Snapshot], bool] | None,
    timeout_s: float,
) -> None:
    deadline, stopping = time.monotonic() + timeout_s, False
    while any(thread.is_alive() for thread in threads):
        for name in [*outcome.errors]:
            synchronizer.declare_lost(name, str(outcome.errors[name]))
        if stop_when is not None and not stopping and stop_when(synchronizer.snapshot()):
            synchronizer.stop("stop_when")
            stopping = True
        if time.monotonic() > deadline:
            raise DeadlineError(
                "the run did not end in time", saw=f"timeout_s = {timeout_s:g}, {synchronizer.snapshot()}"
            )
        time.sleep(0.1 if stop_when is None else 0.02)


def _island(
    name: str,
    job: Job,
    corpus: Corpus,
    storage: Storage,
    epoch: int,
    synchronizer: Synchronizer,
    outcome: InProcessRun,
    tamper: Callable[[IslandRank], None] | None,
) -> None:
    torch.set_num_threads(1)  # per thread: islands share the cores
    with EventLog(storage, f"island-{name}-a{epoch}-0") as events:
        inner = Inner(build_model(job.model, corpus.info.vocab_size, job.data.seq_len, job.seed), job.inner)
        rank = IslandRank(
            name=name,
            job=job,
            link=synchronizer,
            group=Group(),
            inner=inner,
            corpus=corpus,
            events=events,
            versions=library_versions(),
            device="cpu",
        )
        rank.store = IslandStore(
            storage, name, rank.group, rank.parameters, events, epoch=epoch, keep=job.checkpoint.keep
        )
        if tamper is not None:
            tamper(rank)
        try:
            outcome.endings[name] = run_island(rank)
        except Exception as error:  # the caller looks at it, as the controller does under Ray
            outcome.errors[name] = error
