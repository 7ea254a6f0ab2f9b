"""A small corpus, small jobs and short runs for the tests of the runtime: real code, islands as threads."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.base.config import Job
from elastic.base.ranges import RangeSet
from elastic.base.resolve import resolve_job
from elastic.exchange.link import Hello, Snapshot
from elastic.policy.plan import block_sequences, total_sequences
from elastic.runtime.board import RunSetup
from elastic.runtime.entering import parameter_fingerprint
from elastic.runtime.heart import Heart
from elastic.runtime.in_process import InProcessRun, run_in_process
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.opening import open_synchronizer
from elastic.runtime.synchronizer import Synchronizer
from elastic.runtime.versions import library_versions
from elastic.state.initial import initial_parameters
from elastic.state.records import Record, load_records
from elastic.state.replay import LoadedOuter, load_outer
from elastic.state.storage import Storage
from elastic.training.corpus import Corpus, prepare
from elastic.training.inner import Inner
from elastic.training.model import build_model
from elastic.views.event_log import read_events

SEQ_LEN = 16
WORDS = ("island", "sea", "wind", "and", "the", "far", "ship", "sails", "of", "a", "grey", "dawn")


@dataclass
class Run:
    """A run folder and what came out of its last life."""

    storage: Storage
    outcome: InProcessRun
    ranks: dict[str, list[IslandRank]]
    """Every incarnation of every island in this life."""
    trained: dict[str, list[tuple[int, int]]]
    """Batches of positions that each island put through a step, in this life."""

    @property
    def snapshot(self) -> Snapshot:
        """The last look at the synchronizer."""
        assert self.outcome.snapshot is not None
        return self.outcome.snapshot

    @property
    def records(self) -> list[Record]:
        """The records that lead to the newest state."""
        return load_records(self.storage).records

    @property
    def steps(self) -> list[Record]:
        """Records of outer steps and of anchors."""
        return [record for record in self.records if record.kind in ("outer", "anchor")]

    @property
    def digests(self) -> dict[int, str]:
        """Digest of every version."""
        return {record.body["version"]: record.body["digest"] for record in self.steps}

    @property
    def fragment_digests(self) -> dict[tuple[int, int], str]:
        """Digest of every version of every fragment."""
        return {
            (fragment, version): digest
            for record in self.steps
            for fragment, (version, digest) in enumerate(
                zip(record.body["versions"], record.body["digests"], strict=True)
            )
        }

    @property
    def state(self) -> LoadedOuter:
        """The newest outer state, as a later attempt would load it."""
        return load_outer(self.storage, load_records(self.storage))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds."""
        return [event for event in read_events(self.storage) if event["kind"] in kinds]

    def committed_once(self, total: int) -> None:
        """Every position of the budget is committed by exactly one record."""
        seen = RangeSet()
        for record in self.steps:
            ranges = RangeSet.from_json(record.body["committed"])
            assert seen.isdisjoint(ranges), f"{record.name} commits {seen & ranges} again"
            seen = seen | ranges
        assert seen == RangeSet([(0, total)])

    def finished(self, total: int, errors: tuple[str, ...] = ()) -> Run:
        """Check that the run ended as it should, with everything committed once and judged."""
        assert sorted(self.outcome.errors) == sorted(errors), self.outcome.errors
        assert self.snapshot.failure == ""
        assert self.snapshot.finished
        assert self.snapshot.validation["final"]
        self.committed_once(total)
        return self


class Lab:
    """Makes small jobs and runs them in folders of the test."""

    def __init__(self, corpus: Corpus, sources: Path, folder: Path) -> None:
        self.corpus, self.sources, self.folder = corpus, sources, folder
        self.facts: list[tuple[str, dict[str, object]]] = []
        self.opened: list[Synchronizer] = []

    def job(
        self,
        *,
        sequences: int = 96,
        preset: str = "diloco",
        outer: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> Job:
        """A resolved job: batch 4, H 3, fp32, `sequences` positions; sections are merged into it."""
        settings: dict[str, Any] = {
            "name": "small",
            "run_folder": str(self.folder / "run"),
            "data": {"sources": [str(self.sources)], "seq_len": SEQ_LEN},
            "model": {"kind": "decoder", "d_model": 16, "num_layers": 1, "num_heads": 2},
            "budget": {"tokens": sequences * SEQ_LEN},
            "inner": {"batch_sequences": 4, "compute_dtype": "fp32", "lr": 0.01},
            # Nobody is lost on a busy machine unless a test says so.
            "outer": {"preset": preset, "sync_every": 3, "warmup": 0.0, "island_timeout_s": 60.0}
            | dict(outer or {}),
            "validation": {"sequences": 8, "every": 2},
        }
        if preset == "synchronous":
            settings["outer"].pop("warmup")
        for name, section in sections.items():
            settings[name] = (
                settings[name] | section if isinstance(section, dict) and name in settings else section
            )
        return resolve_job(Job.model_validate(settings)).value

    def setup(self, job: Job, islands: tuple[str, ...] = ("eu", "us"), **changes: Any) -> RunSetup:
        """What a synchronizer of this job is told."""
        fields: dict[str, Any] = {
            "job": job,
            "run": job.name,
            "epoch": 1,
            "islands": islands,
            "total_sequences": total_sequences(job, len(self.corpus.train)),
            "block_sequences": block_sequences(job),
            "validation_sequences": len(self.corpus.validation),
            "tokens_per_byte": self.corpus.info.validation.tokens_per_byte,
            "vocab_size": self.corpus.info.vocab_size,
        }
        return RunSetup(**fields | changes)

    def run(
        self,
        job: Job,
        islands: tuple[str, ...] = ("eu", "us"),
        *,
        folder: str = "run",
        stop_when: Callable[[Snapshot], bool] | None = None,
        tamper: Mapping[str, Callable[[IslandRank], None]] | None = None,
        restarts: int = 0,
    ) -> Run:
        """Run or continue `job` in `folder`."""
        run = Run(Storage(self.folder / folder), InProcessRun(), {}, {})

        def prepare_rank(rank: IslandRank) -> None:
            _quick(rank)
            run.ranks.setdefault(rank.name, []).append(rank)
            _watch_order(rank, run.trained.setdefault(rank.name, []))
            if tamper and rank.name in tamper:
                tamper[rank.name](rank)

        run.outcome = run_in_process(
            job,
            self.corpus.folder,
            run.storage,
            islands,
            stop_when=stop_when,
            tamper=dict.fromkeys(islands, prepare_rank),
            restarts=restarts,
            timeout_s=60.0,
        )
        return run

    def synchronizer(
        self, job: Job, islands: tuple[str, ...] = ("eu", "us"), *, folder: str = "run", **setup: Any
    ) -> Synchronizer:
        """A synchronizer of its own, closed after the test; its events are in `self.facts`."""
        opened = open_synchronizer(self.setup(job, islands, **setup), Storage(self.folder / folder), self)
        self.opened.append(opened)
        return opened

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take an event of `synchronizer`."""
        self.facts.append((kind, dict(fields)))

    def hello(self, job: Job, island: str, **changes: Any) -> Hello:
        """What an island of this job says when it joins."""
        initial = initial_parameters(job, self.corpus.info.vocab_size)
        parameters = parameter_fingerprint({name: value.shape for name, value in initial.items()})
        fields = {"workers": 1, "device": "cpu", "versions": library_versions(), "parameters": parameters}
        return Hello(island, **fields | changes)

    def inner(self, job: Job) -> Inner:
        """A fresh island's model and optimiser."""
        return Inner(build_model(job.model, self.corpus.info.vocab_size, SEQ_LEN, job.seed), job.inner)

    @staticmethod
    def before_step(number: int, act: Callable[[IslandRank], None]) -> Callable[[IslandRank], None]:
        """Trouble for an island: `act(rank)` before the gradient of an incarnation's step, from 1 on."""
        return lambda rank: _wrap(rank, "gradient", number, act, before=True)

    @staticmethod
    def after_step(number: int, act: Callable[[IslandRank], None]) -> Callable[[IslandRank], None]:
        """Trouble for an island: `act(rank)` after AdamW's step of that number, from 1 on."""
        return lambda rank: _wrap(rank, "step", number, act, before=False)

    @staticmethod
    def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
        """Wait for something that must come."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come"
            time.sleep(0.002)


def _wrap(
    rank: IslandRank, what: str, number: int, act: Callable[[IslandRank], None], *, before: bool
) -> None:
    numbers, wrapped = itertools.count(1), getattr(rank.inner, what)

    def call(*arguments: Any) -> Any:
        now = next(numbers) == number
        if now and before:
            act(rank)
        result = wrapped(*arguments)
        if now and not before:
            act(rank)
        return result

    setattr(rank.inner, what, call)


def _watch_order(rank: IslandRank, trained: list[tuple[int, int]]) -> None:
    """Note the positions of each batch when it is read."""
    sequences = rank.order.sequences

    def call(start: int, stop: int) -> Any:
        trained.append((start, stop))
        return sequences(start, stop)

    rank.order.sequences = call  # type: ignore[method-assign]


def _quick(rank: IslandRank) -> None:
    """Hear of a stop within milliseconds, and never sleep long."""
    rank.heart = Heart(rank.link, lambda: rank.member, lambda: rank.beat, every_s=0.01)
    rank.sleep = lambda seconds: time.sleep(min(seconds, 0.02))


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    """Folder of sources, and the corpus made of them."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = folder / "sources"
    sources.mkdir()
    random_ = random.Random(7)
    for number in range(12):
        words = (random_.choice(WORDS) for _ in range(100 + 60 * (number % 4)))
        (sources / f"{number:02d}.txt").write_text(" ".join(words))
    job = Lab(None, sources, folder).job()  # type: ignore[arg-type]
    info = prepare(job.data, folder / "data")
    return sources, Corpus.open(folder / "data" / info.key)


@pytest.fixture(scope="session")
def make_lab(small_corpus: tuple[Path, Corpus]) -> Callable[[Path], Lab]:
    """Makes a lab in a folder, for runs that several tests look at."""
    sources, corpus = small_corpus
    return lambda folder: Lab(corpus, sources, folder)


@pytest.fixture
def lab(small_corpus: tuple[Path, Corpus], tmp_path: Path) -> Iterator[Lab]:
    """Small jobs and runs."""
    sources, corpus = small_corpus
    made = Lab(corpus, sources, tmp_path)
    yield made
    for synchronizer in made.opened:
        synchronizer.close()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
