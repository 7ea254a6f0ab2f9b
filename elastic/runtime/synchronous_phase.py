"""Data parallel across islands on one rank: the gradient of every inner step is exchanged.

It is the baseline and the warm-up (docs/design/0002-synchronous-phase.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch

from elastic.base.errors import DeadlineError
from elastic.base.events import ALL_FRAGMENTS
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Donate, Packet, Part
from elastic.exchange.wire import Wire, pack
from elastic.runtime.island_rank import IslandRank, RebaseError, StopAsked
from elastic.runtime.phase import POLL_S, Stepped, adopted, tokens_of
from elastic.runtime.progress import Progress
from elastic.training.digest import partial_digest


def await_packet(rank: IslandRank, kind: Literal["version", "gradient"], number: int) -> Packet:
    """The packet `number`, the same one on all ranks; see `await_reply`."""
    reply = await_reply(rank, kind, number)
    if not isinstance(reply, Packet):
        raise RuntimeError(f"island {rank.name} was asked for tensors while it waited for {kind} {number}")
    return reply


def await_reply(rank: IslandRank, kind: Literal["version", "gradient"], number: int) -> Packet | Donate:
    """The packet `number`, or the wish for this island's tensors, the same on all ranks.

    Time spent here is `stall_s`: the inner loop stands still. Raises StopAsked when the run ends
    meanwhile and DeadlineError after `outer.sync_timeout_s`.
    """
    limit_s = rank.job.outer.sync_timeout_s
    began = rank.clock()
    got: list[Packet | Donate] = []

    def decide() -> dict[str, Any]:
        while rank.clock() - began < limit_s:
            reply = rank.link.fetch(rank.me, kind, 0, number, POLL_S)
            if reply is not None:
                got.append(reply)
                return {"number": reply.number} if isinstance(reply, Packet) else {"donate": True}
            if rank.stop_asked():
                return {"stop": True}
        raise DeadlineError(
            f"island {rank.name} waited too long for {kind} {number}",
            saw=f"outer.sync_timeout_s = {limit_s:g}",
            fix="`elastic status RUN` names the island that does not contribute",
        )

    def as_agreed() -> Packet | Donate:
        reply = got[0] if got else rank.link.fetch(rank.me, kind, 0, outcome["number"], limit_s)
        if reply is None:
            raise DeadlineError(f"rank {rank.group.rank} of island {rank.name} never got {kind} {number}")
        return reply

    outcome = rank.agree(decide)
    rank.stall_s += rank.clock() - began
    if "stop" in outcome:
        raise StopAsked
    return rank.everyone(as_agreed) if "number" in outcome else Donate()


class SynchronousPhase:
    """Data parallel across islands: the merged mean gradient, stepped by identical AdamW.

    All islands hold the same bits all the time, so a version is not sent back: after a stretch of
    steps one island hands its parameters and moments to the synchronizer (the *anchor*), all hand
    in digests, and the durable anchor is the new version.
    """

    name = "synchronous"

    def __init__(self, rank: IslandRank, version: int, gradient_step: int) -> None:
        self.rank, self.steps_since = rank, 0
        self.versions = [version] * len(rank.fragments)
        self._gradient_step = gradient_step
        self._tokens, self._loss_sum = 0, 0.0
        self._anchor_due = False

    @property
    def version(self) -> int:
        """That every fragment has reached."""
        return self.versions[0]

    def take_step(self, batch: np.ndarray, positions: tuple[int, int], lr: float) -> Stepped:
        """Exchange the gradient; clip the merged mean by its own norm; AdamW."""
        rank, inner = self.rank, self.rank.inner
        loss = inner.gradient(batch)
        number = self._gradient_step + 1
        rows = rank.placed(inner.gradients())
        part = self._part("gradient", number, tokens_of(batch), RangeSet([positions]), float(loss.total))
        finite = all(bool(torch.isfinite(gradient).all()) for _, gradient in rows.values())
        part = dataclasses.replace(part, rows=pack(rows, "fp32") if finite else None, finite=finite)
        rank.settle(lambda: rank.link.offer(part))
        packet = await_packet(rank, "gradient", number)
        if packet.number != number:
            why = f"gradient {number} was merged without this island, {packet.number} is the newest"
            raise RebaseError(why)
        inner.set_gradients(rank.own_rows(packet.tensors))
        inner.clip(packet.grad_norm)
        inner.step(lr)
        self._gradient_step, self._anchor_due = number, packet.anchor
        self.steps_since += 1
        stepped = Stepped(float(loss.total), loss.tokens, tokens_of(batch), packet.grad_norm)
        self._tokens, self._loss_sum = self._tokens + stepped.tokens, self._loss_sum + stepped.loss_sum
        return stepped

    def is_due(self) -> bool:
        """When the synchronizer asked for an anchor with the last gradient."""
        return self._anchor_due

    def may_stop(self) -> bool:
        """Between stretches only: what the islands do in a stretch becomes durable with its anchor."""
        return self.steps_since == 0

    def synchronise(self) -> Iterator[Packet]:
        """Hand in the digest, and the tensors if this island is the donor; adopt the new version."""
        rank, began = self.rank, self.rank.clock()
        part = self._part("anchor", self.version + 1, self._tokens, RangeSet(), self._loss_sum)
        own = [partial_digest(rank.placed(rank.local())), partial_digest(self._moments())]
        part = dataclasses.replace(part, partial_digest=tuple(torch.cat(own).tolist()))
        rank.settle(lambda: rank.link.offer(part))
        packet = await_reply(rank, "version", self.version + 1)
        if isinstance(packet, Donate):
            whole = dataclasses.replace(part, rows=self._state())
            rank.settle(lambda: rank.link.offer(whole))
            packet = await_packet(rank, "version", self.version + 1)
        adopted(rank, packet, ALL_FRAGMENTS, rank.digest_of(rank.local()), rank.clock() - began)
        self.versions = [packet.number] * len(self.versions)
        self.steps_since, self._anchor_due = 0, False
        self._tokens, self._loss_sum = 0, 0.0
        rank.feed.let_go()
        yield packet

    def flush(self) -> Iterator[Packet]:
        """As always: the stretch ends with an anchor."""
        return self.synchronise()

    def abandon(self) -> None:
        """Nothing is under way between two calls."""

    def progress(self) -> Progress:
        """For a checkpoint: between stretches there is nothing but the version."""
        return Progress(list(self.versions), basis=self.rank.basis)

    def snapshots(self) -> dict[str, torch.Tensor]:
        """None: nothing is under way."""
        return {}

    def outer_values(self) -> AbstractContextManager[None]:
        """The local values are the outer ones."""
        return nullcontext()

    def _part(
        self, kind: Literal["gradient", "anchor"], seq: int, tokens: int, ranges: RangeSet, loss_sum: float
    ) -> Part:
        step = self.rank.step
        return Part(
            member=self.rank.me,
            kind=kind,
            fragment=0,
            seq=seq,
            base_version=self.version if kind == "anchor" else self._gradient_step,
            from_step=step,
            to_step=step + 1 if kind == "gradient" else step,
            tokens=tokens,
            steps=1 if kind == "gradient" else self.steps_since,
            ranges=ranges,
            rows=None,
            loss_sum=loss_sum,
        )

    def _state(self) -> Wire:
        """Parameters and AdamW moments of this rank: 12 bytes a parameter."""
        return pack(self.rank.placed(self.rank.local()) | self._moments(), "fp32")

    def _moments(self) -> dict[str, tuple[int, torch.Tensor]]:
        """The moments of the rows that this rank speaks for, as `exp_avg/<name>` and `exp_avg_sq/<name>`."""
        placed = {}
        for index, moment in enumerate(("exp_avg", "exp_avg_sq")):
            rows = {name: pair[index] for name, pair in self.rank.inner.moments().items()}
            placed |= {f"{moment}/{name}": row for name, row in self.rank.placed(rows).items()}
        return placed
