"""The global parameters and everything that must survive with them, in memory and in the run folder.

`OuterStore` is the single writer of an epoch. Each change is durable (tensors first, then the record
that names them) before it is visible to an island. A new epoch goes on from the newest valid record
of the last one; the ledger is derived from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.base.config import Job
from elastic.base.errors import LockHeldError
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.state import tensors as tensor_files
from elastic.state.layout import LOCK, delta_name, parse_lock_name, snapshot_name
from elastic.state.records import Lineage, RecordLog
from elastic.state.replay import load_outer
from elastic.state.storage import Storage
from elastic.training.digest import digest
from elastic.training.outer import OuterState

Tensors = dict[str, torch.Tensor]
FallBack = Callable[[str, str, str], None]

NEW_COUNTERS: dict[str, float] = {
    "outer_steps": 0,
    "synchronous_steps": 0,
    "replayed_sequences": 0,
    "committed_tokens": 0,
    "bytes_up": 0,
    "bytes_down": 0,
    "bytes_up_warmup": 0,
    "bytes_down_warmup": 0,
    "wall_s": 0.0,
    "cost": 0.0,
}


@dataclass
class OuterStore:
    """The outer state of a run and the only way to change it."""

    storage: Storage
    log: RecordLog
    job: Job
    run: str
    state: OuterState
    moments: Tensors = field(default_factory=dict)
    """AdamW's moments at the newest anchor: `exp_avg/<name>`, `exp_avg_sq/<name>`."""
    adam_steps: int = 0
    version: int = 0
    phase: str = "outer"
    committed: RangeSet = RangeSet()
    generations: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=lambda: dict(NEW_COUNTERS))
    validation: list[dict[str, Any]] = field(default_factory=list)
    kept: list[tuple[int, str, str]] = field(default_factory=list)
    """Tensor files not retired yet: (version, what, name)."""
    digest: str = ""

    # ------------------------------------------------------------------------------- beginning

    @classmethod
    def open(
        cls,
        storage: Storage,
        job: Job,
        run: str,
        epoch: int,
        lineage: Lineage,
        initial: Callable[[], Tensors],
        dealing: Mapping[str, int],
        fell_back: FallBack,
        phase: str = "outer",
    ) -> OuterStore:
        """Continue from the newest durable state, or start with `initial()` as version 0 in `phase`.

        `dealing`: total_sequences and block_sequences, part of the first record of the epoch.
        `fell_back(name, reason, instead)` is told of every file that could not be used.
        """
        log = RecordLog(storage, epoch, lineage.last)
        if lineage.last is None:
            store = cls(storage, log, job, run, OuterState(initial()), phase=phase)
            store.digest = digest(store.state.published)
            store._append("start", {**dealing, "fragments": 1, "tensors": store._write_snapshot()})
            return store
        loaded = load_outer(storage, lineage, fell_back)
        body = loaded.last.body
        store = cls(
            storage,
            log,
            job,
            run,
            loaded.state,
            moments=loaded.moments,
            adam_steps=loaded.adam_steps,
            version=loaded.version,
            phase=body["phase"],
            committed=loaded.committed,
            generations=dict(body["generations"]),
            counters={**NEW_COUNTERS, **body["counters"]},
            validation=list(body["validation"]),
            kept=loaded.kept,
        )
        store.log = RecordLog(storage, epoch, loaded.last)
        store.digest = digest(store.state.published)
        store._append("resume", dict(dealing))
        return store

    # -------------------------------------------------------------------------------- changing

    def commit_outer(
        self,
        version: int,
        contributions: list[dict[str, Any]],
        committed: RangeSet,
        merged: Tensors | None,
        scale: float,
    ) -> Tensors:
        """One outer step: step, make it durable, return the packet for the islands.

        `merged`: the weighted mean delta, None if nobody trained (the version rises, nothing moves).
        """
        outer = self.job.outer
        if merged is not None:
            self.state.step(merged, known(outer.lr), known(outer.momentum), scale)
        packet = self.state.publish(outer.codec_down)
        self.version, self.digest = version, digest(self.state.published)
        self.committed = self.committed | committed
        self.counters["outer_steps"] += 1
        stored = [self._write_delta(merged)]
        if version % self.job.checkpoint.snapshot_every == 0:
            stored.append(self._write_snapshot())
        optimiser = {"lr": outer.lr, "momentum": outer.momentum, "codec_down": outer.codec_down}
        more = {"scale": scale, "moved": merged is not None, "optimiser": optimiser}
        self._commit("outer", version, contributions, committed, stored, more)
        return packet

    def commit_anchor(
        self,
        version: int,
        contributions: list[dict[str, Any]],
        committed: RangeSet,
        parameters: Tensors,
        moments: Tensors,
        steps: int,
        phase: str,
    ) -> None:
        """A stretch of synchronous steps: the islands' common parameters become the version."""
        self.state = OuterState({name: value.clone() for name, value in parameters.items()})
        self.moments, self.adam_steps = moments, self.adam_steps + steps
        self.version, self.digest, self.phase = version, digest(self.state.published), phase
        self.committed = self.committed | committed
        self.counters["synchronous_steps"] += steps
        self._commit(
            "anchor",
            version,
            contributions,
            committed,
            [self._write_snapshot()],
            {"adam_steps": self.adam_steps},
        )

    def commit_validation(self, result: dict[str, Any]) -> None:
        """A validation of the outer parameters is part of the state."""
        self.validation = [*self.validation[-99:], result]
        self._append("validation", dict(result))

    # ---------------------------------------------------------------------------------- inside

    def _commit(
        self,
        kind: str,
        version: int,
        contributions: list[dict[str, Any]],
        committed: RangeSet,
        stored: list[dict[str, Any]],
        more: dict[str, Any],
    ) -> None:
        retired = self._retired()
        self.counters["committed_tokens"] = len(self.committed) * self.job.data.seq_len
        self._append(
            kind,
            {
                "fragment": 0,
                "version": version,
                "contributions": contributions,
                "committed": committed.to_json(),
                "tensors": stored,
                "retired": retired,
                **more,
            },
        )
        if retired:
            self._require_lock()
        for name in retired:  # only after the record that says so
            self.storage.delete(name)

    def _append(self, kind: str, body: Mapping[str, Any]) -> None:
        self.log.append(
            kind,
            {
                **body,
                "run": self.run,
                "versions": [self.version],
                "digest": self.digest,
                "phase": self.phase,
                "generations": dict(self.generations),
                "counters": dict(self.counters),
                "validation": self.validation,
            },
        )

    def _require_lock(self) -> None:
        """A driver that lost the run lock must not delete what its successor may need."""
        epochs = [parse_lock_name(name) or 0 for name in self.storage.list(LOCK)]
        if max(epochs, default=0) > self.log.epoch:
            raise LockHeldError(
                "another driver has taken the run over",
                where=self.storage.url,
                saw=f"epoch {max(epochs)}, this driver has {self.log.epoch}",
                fix="let this one end; the other continues the run",
            )

    def _write_delta(self, merged: Tensors | None) -> dict[str, Any]:
        """The merged delta; it leads over this version even when the snapshot beside it is damaged."""
        delta = merged
        if delta is None:
            delta = {name: torch.zeros_like(value) for name, value in self.state.theta.items()}
        name = delta_name(0, self.version, self.log.epoch)
        stored = tensor_files.save(self.storage, name, delta)
        self.kept.append((self.version, "delta", name))
        return {"what": "delta", **stored.to_json()}

    def _write_snapshot(self) -> dict[str, Any]:
        tensors = {f"theta/{name}": value for name, value in self.state.theta.items()}
        tensors |= {f"momentum/{name}": value for name, value in self.state.momentum.items()}
        tensors |= {f"published/{name}": value for name, value in self.state.published.items()}
        tensors |= self.moments
        name = snapshot_name(0, self.version, self.log.epoch)
        stored = tensor_files.save(self.storage, name, tensors)
        self.kept.append((self.version, "snapshot", name))
        return {"what": "snapshot", **stored.to_json()}

    def _retired(self) -> list[str]:
        """Files older than the oldest of the `checkpoint.keep` newest snapshots; they are let go."""
        snapshots = sorted(version for version, what, _ in self.kept if what == "snapshot")
        if len(snapshots) <= self.job.checkpoint.keep:
            return []
        oldest = snapshots[-self.job.checkpoint.keep]

        def is_old(entry: tuple[int, str, str]) -> bool:
            return entry[0] < oldest or entry[:2] == (oldest, "delta")

        retired = [entry[2] for entry in self.kept if is_old(entry)]
        self.kept = [entry for entry in self.kept if not is_old(entry)]
        return retired
