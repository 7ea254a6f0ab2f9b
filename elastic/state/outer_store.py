"""The global parameters and everything that must survive with them, in memory and in the run folder.

`OuterStore` is the single writer of an epoch. Each change is durable (tensors first, then the record
that names them) before it is visible to an island. A new epoch goes on from the newest valid record
of the last one; the ledger is derived from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from elastic.state.replay import Kept, load_outer, turns_of
from elastic.state.storage import Storage
from elastic.training.digest import finish_digest, partial_digest
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
    """The outer state of a run, by fragment, and the only way to change it."""

    storage: Storage
    log: RecordLog
    job: Job
    run: str
    states: list[OuterState]
    """One per fragment."""
    moments: Tensors = field(default_factory=dict)
    """AdamW's moments at the newest anchor: `exp_avg/<name>`, `exp_avg_sq/<name>`."""
    adam_steps: int = 0
    versions: list[int] = field(default_factory=lambda: [0])
    """Of each fragment."""
    phase: str = "outer"
    committed: RangeSet = RangeSet()
    generations: dict[str, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=lambda: dict(NEW_COUNTERS))
    validation: list[dict[str, Any]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    """Tensor files not retired yet."""
    merged_turns: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """By fragment: (generation, seq) of the contributions that its newest version took in, by island."""
    last_fragment: int = -1
    """The fragment of the newest outer step; -1 after an anchor or at the start."""
    _sums: list[torch.Tensor] = field(default_factory=list)
    """Partial digest of each fragment's published values."""

    def __post_init__(self) -> None:
        """Digests follow from the states."""
        self._sums = [_sum_of(state) for state in self.states]
        self.merged_turns = self.merged_turns or [{} for _ in self.states]

    # ---------------------------------------------------------------------------------- reading

    @property
    def version(self) -> int:
        """The version that every fragment has reached."""
        return min(self.versions)

    @property
    def digest(self) -> str:
        """Digest of all published parameters: the sum over the fragments."""
        return finish_digest(torch.stack(self._sums).sum(0))

    @property
    def digests(self) -> list[str]:
        """Digest of each fragment's published parameters."""
        return [finish_digest(total) for total in self._sums]

    @property
    def names(self) -> list[list[str]]:
        """The parameters of each fragment."""
        return [list(state.theta) for state in self.states]

    @property
    def published(self) -> Tensors:
        """What islands hold, all fragments together."""
        return {name: value for state in self.states for name, value in state.published.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter."""
        return {name: tuple(value.shape) for state in self.states for name, value in state.theta.items()}

    # ------------------------------------------------------------------------------- beginning

    @classmethod
    def open(
        cls,
        storage: Storage,
        job: Job,
        run: str,
        epoch: int,
        lineage: Lineage,
        initial: Callable[[], Sequence[Tensors]],
        dealing: Mapping[str, int],
        fell_back: FallBack,
        phase: str = "outer",
    ) -> OuterStore:
        """Continue from the newest durable state, or start with `initial()` as version 0 in `phase`.

        `initial`: the parameters of each fragment. `dealing`: total_sequences and block_sequences, part of
        the first record of the epoch. `fell_back(name, reason, instead)` is told of every file that could
        not be used.
        """
        log = RecordLog(storage, epoch, lineage.last)
        if lineage.last is None:
            states = [OuterState(tensors) for tensors in initial()]
            store = cls(storage, log, job, run, states, versions=[0] * len(states), phase=phase)
            stored = [store._write_snapshot(fragment) for fragment in range(len(states))]
            store._append("start", {**dealing, "fragments": len(states), "tensors": stored})
            return store
        loaded = load_outer(storage, lineage, fell_back)
        body = loaded.last.body
        store = cls(
            storage,
            log,
            job,
            run,
            loaded.states,
            moments=loaded.moments,
            adam_steps=loaded.adam_steps,
            versions=list(body["versions"]),
            phase=body["phase"],
            committed=loaded.committed,
            generations=dict(body["generations"]),
            counters={**NEW_COUNTERS, **body["counters"]},
            validation=list(body["validation"]),
            kept=loaded.kept,
            merged_turns=loaded.merged_turns,
            last_fragment=loaded.last_fragment,
        )
        store.log = RecordLog(storage, epoch, loaded.last)
        store._append("resume", dict(dealing))
        return store

    # -------------------------------------------------------------------------------- changing

    def commit_outer(
        self,
        fragment: int,
        version: int,
        contributions: list[dict[str, Any]],
        committed: RangeSet,
        merged: Tensors | None,
        scale: float,
    ) -> Tensors:
        """One outer step of a fragment: step, make it durable, return the packet for the islands.

        `merged`: the weighted mean delta, None if nobody trained (the version rises, nothing moves).
        """
        outer, state = self.job.outer, self.states[fragment]
        if merged is not None:
            state.step(merged, known(outer.lr), known(outer.momentum), scale)
        packet = state.publish(known(outer.codec_down))
        self.versions[fragment], self._sums[fragment] = version, _sum_of(state)
        self.committed = self.committed | committed
        self.counters["outer_steps"] += 1
        stored = [self._write_delta(fragment, merged)]
        if version % self.job.checkpoint.snapshot_every == 0:
            stored.append(self._write_snapshot(fragment))
        optimiser = {"lr": outer.lr, "momentum": outer.momentum, "codec_down": outer.codec_down}
        more = {"scale": scale, "moved": merged is not None, "optimiser": optimiser}
        self._commit("outer", fragment, version, contributions, committed, stored, more)
        self.last_fragment = fragment
        self.merged_turns[fragment] = turns_of(contributions)
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
        """A stretch of synchronous steps: the islands' common parameters are the version of all fragments."""
        self.states = [
            OuterState({name: parameters[name].clone() for name in fragment}) for fragment in self.names
        ]
        self._sums = [_sum_of(state) for state in self.states]
        self.moments, self.adam_steps = moments, self.adam_steps + steps
        self.versions, self.phase = [version] * len(self.states), phase
        self.committed = self.committed | committed
        self.counters["synchronous_steps"] += steps
        self.last_fragment, self.merged_turns = -1, [{} for _ in self.states]
        stored = [self._write_snapshot(fragment) for fragment in range(len(self.states))]
        more = {"adam_steps": self.adam_steps}
        self._commit("anchor", 0, version, contributions, committed, stored, more)

    def commit_validation(self, result: dict[str, Any]) -> None:
        """A validation of the outer parameters is part of the state."""
        self.validation = [*self.validation[-99:], result]
        self._append("validation", dict(result))

    # ---------------------------------------------------------------------------------- inside

    def _commit(
        self,
        kind: str,
        fragment: int,
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
                "fragment": fragment,
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
                "versions": list(self.versions),
                "digest": self.digest,
                "digests": self.digests,
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

    def _write_delta(self, fragment: int, merged: Tensors | None) -> dict[str, Any]:
        """The merged delta; it leads over this version even when the snapshot beside it is damaged."""
        delta = merged
        if delta is None:
            delta = {name: torch.zeros_like(value) for name, value in self.states[fragment].theta.items()}
        return self._write(
            "delta", fragment, delta_name(fragment, self.versions[fragment], self.log.epoch), delta
        )

    def _write_snapshot(self, fragment: int) -> dict[str, Any]:
        state = self.states[fragment]
        tensors = {f"theta/{name}": value for name, value in state.theta.items()}
        tensors |= {f"momentum/{name}": value for name, value in state.momentum.items()}
        tensors |= {f"published/{name}": value for name, value in state.published.items()}
        tensors |= {key: value for key, value in self.moments.items() if key.partition("/")[2] in state.theta}
        name = snapshot_name(fragment, self.versions[fragment], self.log.epoch)
        return self._write("snapshot", fragment, name, tensors)

    def _write(self, what: str, fragment: int, name: str, tensors: Tensors) -> dict[str, Any]:
        stored = tensor_files.save(self.storage, name, tensors)
        self.kept.append(Kept(fragment, self.versions[fragment], what, name))
        return {"what": what, "fragment": fragment, **stored.to_json()}

    def _retired(self) -> list[str]:
        """Of each fragment the files older than the oldest of its `checkpoint.keep` newest snapshots."""
        retired: list[Kept] = []
        for fragment in range(len(self.states)):
            mine = [entry for entry in self.kept if entry.fragment == fragment]
            snapshots = sorted(entry.version for entry in mine if entry.what == "snapshot")
            if len(snapshots) <= self.job.checkpoint.keep:
                continue
            oldest = snapshots[-self.job.checkpoint.keep]
            retired += [
                entry
                for entry in mine
                if entry.version < oldest or (entry.version, entry.what) == (oldest, "delta")
            ]
        self.kept = [entry for entry in self.kept if entry not in retired]
        return [entry.name for entry in retired]


def _sum_of(state: OuterState) -> torch.Tensor:
    """Partial digest of what islands hold of a fragment."""
    return partial_digest({name: (0, value) for name, value in state.published.items()})
