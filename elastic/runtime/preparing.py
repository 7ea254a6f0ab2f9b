"""Before any island starts: the corpus, the identity of the run, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.base.config import Fleet, Job
from elastic.base.errors import RunFolderError
from elastic.base.events import EventSink
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.base.resolve import Resolved
from elastic.policy.plan import block_sequences, total_sequences
from elastic.runtime.board import RunSetup
from elastic.runtime.corpora import cache_path, open_corpus
from elastic.runtime.run_folder import identify
from elastic.state.records import Lineage, load_records
from elastic.state.replay import committed_by
from elastic.state.run_file import read_run
from elastic.state.storage import Storage
from elastic.training.corpus import Corpus, CorpusInfo
from elastic.training.listing import compare

PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True)
class Prepared:
    """All that is fixed before the first island starts."""

    job: Job
    fleet: Fleet
    run: str
    epoch: int
    info: CorpusInfo
    corpus_cache: str
    asked_sequences: int
    """What the budget asks for."""
    total_sequences: int
    """The same, or what is committed already if that is more."""
    block_sequences: int
    committed: int
    islands: int
    """That have contributed so far."""
    versions: tuple[int, ...]
    """Of each fragment."""
    counters: Mapping[str, float]
    validation: Mapping[str, Any]
    digest: str
    complete: bool
    """The whole budget is committed and the last version judged: nothing is left to do."""

    @property
    def nothing_to_do(self) -> str:
        """Why a complete run is left as it is."""
        if self.committed > self.asked_sequences:
            return (
                f"nothing to do: {self.committed} sequences are committed and judged, "
                f"this budget asks for {self.asked_sequences}"
            )
        return "nothing to do: the budget is committed and judged"

    def setup(self, islands: tuple[str, ...]) -> RunSetup:
        """What the synchronizer is told."""
        prices = {i.name: i.price_per_worker_hour for i in self.fleet.islands if i.price_per_worker_hour}
        return RunSetup(
            job=self.job,
            run=self.run,
            epoch=self.epoch,
            islands=islands,
            total_sequences=self.total_sequences,
            block_sequences=self.block_sequences,
            validation_sequences=self.info.validation.sequences,
            tokens_per_byte=self.info.validation.tokens_per_byte,
            vocab_size=self.info.vocab_size,
            prices=prices,
        )


def prepare_run(
    storage: Storage,
    fleet: Fleet,
    job: Resolved[Job],
    epoch: int,
    events: EventSink,
    check: Callable[[], None] = lambda: None,
) -> Prepared:
    """Tokenise the corpus if that was not done, check the run's identity, read its records.

    `check` is called often while the corpus is read; what it raises ends that.
    """
    value = job.value
    for key, origin in job.origins.items():
        if origin.source == "derived":
            events.emit("derived", {"key": key, "value": origin.value, "why": origin.why})
    corpus = _corpus(storage, value, events, check)
    info = corpus.info
    if not info.validation.sequences:
        raise RunFolderError(
            "no held-out sequence is left",
            where="data.validation_share",
            saw=f"{info.validation.tokens} held-out tokens, a sequence needs {value.data.seq_len + 1}",
            fix="raise data.validation_share, give validation_sources, or lower data.seq_len",
        )
    about = {
        "manifest": info.manifest_hash,
        "vocab_size": info.vocab_size,
        "seq_len": info.seq_len,
        "corpus": info.key,
    }
    identity = identify(storage, value, fleet, about)
    lineage = load_records(storage)
    total = total_sequences(value, info.train.sequences)
    committed = committed_by(lineage.records)
    body = lineage.last.body if lineage.last else {}
    judged = [v for v in body.get("validation", []) if v["final"] and v["version"] == min(body["versions"])]
    complete = len(committed) >= total and bool(judged)
    if not complete:
        _check_budget(committed, total, value)
    left = body.get("phase") == "outer" and min(body["versions"]) > 0
    if value.outer.preset == "synchronous" and left and not complete:
        raise RunFolderError(
            "a run that has left the synchronous phase cannot go back to it: its islands' moments differ",
            where="outer.preset",
            saw=f"version {min(body['versions'])} of an outer phase",
            fix="keep the preset, or begin a new run with init_from",
        )
    events.emit(
        "run_started",
        {
            "run": identity.run,
            "attempt": epoch,
            "epoch": epoch,
            "continued": identity.continued,
            "versions": body.get("versions", [0]),
        },
    )
    return Prepared(
        job=value,
        fleet=fleet,
        run=identity.run,
        epoch=epoch,
        info=info,
        corpus_cache=cache_path(known(value.data.cache_folder)),
        asked_sequences=total,
        total_sequences=max(total, len(committed)),
        block_sequences=_block(lineage, value),
        committed=len(committed),
        islands=len(body.get("generations", {})),
        versions=tuple(body.get("versions", [0])),
        counters=body.get("counters", {}),
        validation=judged[-1] if judged else {},
        digest=next((r.body["digest"] for r in reversed(lineage.records) if "digest" in r.body), ""),
        complete=complete,
    )


def _corpus(storage: Storage, job: Job, events: EventSink, check: Callable[[], None]) -> Corpus:
    """The run's corpus. A continued run keeps the tokenised copy it has, and names sources that changed."""
    told = float("-inf")

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal told
        check()
        if time.monotonic() - told < PROGRESS_EVERY_S and done < total:
            return
        told = time.monotonic()
        events.emit("data_progress", {"stage": stage, "done": done, "total": total, "unit": "bytes"})

    there = read_run(storage) or {}
    cache = cache_path(known(job.data.cache_folder))
    corpus = open_corpus(job.data, cache, there.get("corpus", ""), there.get("manifest", ""), progress)
    info = corpus.info
    if there and (changed := compare(corpus.manifest(), job.data)):
        events.emit("data_changed", {"files": [str(change) for change in changed]})
    events.emit(
        "data_ready",
        {
            "manifest": info.manifest_hash,
            "train_sequences": info.train.sequences,
            "validation_sequences": info.validation.sequences,
            "train_bytes": info.train.bytes,
            "validation_bytes": info.validation.bytes,
            "skipped": [name for name, _ in info.skipped_files],
        },
    )
    return corpus


def _check_budget(committed: RangeSet, total: int, job: Job) -> None:
    """A smaller budget than what is dealt out already cannot be met any more."""
    last = max((stop for _, stop in committed), default=0)
    if last > total:
        raise RunFolderError(
            "the budget is smaller than what this run has trained on",
            where="budget",
            saw=f"{total} sequences, position {last - 1} is committed",
            fix=f"give budget.tokens of at least {last * job.data.seq_len}",
        )


def _block(lineage: Lineage, job: Job) -> int:
    """Sequences leased at once: fixed by the first record of the run."""
    first = lineage.records[0].body if lineage.records else {}
    return int(first.get("block_sequences", block_sequences(job)))
