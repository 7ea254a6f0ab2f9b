"""The two ways an island's steps reach the other islands, behind one small interface.

`SynchronousPhase` exchanges the gradient of every inner step (the baseline, and the warm-up).
`OuterPhase` takes inner steps alone and exchanges the delta of a whole period (DiLoCo).
The loop holds one of them at a time and never asks which.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import numpy as np
import torch

from elastic.base.errors import DeadlineError
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Donate, Packet, Part, Receipt
from elastic.exchange.wire import Wire, pack
from elastic.policy.pacing import Pace
from elastic.runtime.island_rank import IslandRank, RebaseError, StopAsked
from elastic.training.digest import partial_digest

POLL_S = 1.0


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What one inner step did."""

    loss_sum: float
    """Training loss summed over this rank's share of the batch, nats."""
    own_tokens: int
    """Tokens of that share."""
    tokens: int
    """Tokens of the island's whole batch."""
    grad_norm: float
    """Global norm before clipping."""


class Phase(Protocol):
    """How inner steps reach the others. A Protocol so that the loop has no mode flags."""

    name: str
    version: int
    """Version the local parameters started from."""
    steps_since: int
    """Inner steps since that version."""

    def take_step(self, batch: np.ndarray, positions: tuple[int, int], lr: float) -> Stepped:
        """One inner step on `batch` [B, T + 1], which are these positions of the order."""

    def is_due(self) -> bool:
        """Whether the islands must talk now."""

    def may_stop(self) -> bool:
        """Whether the island could save itself now and later go on from there."""

    def synchronise(self) -> Packet:
        """Hand in, wait for the next version, adopt it."""


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


def adopted(rank: IslandRank, packet: Packet, tensors: dict[str, torch.Tensor], began: float) -> None:
    """Check that what the ranks hold is what was published, and say so."""
    digest = rank.digest_of(tensors)
    if digest != packet.digest:
        raise RuntimeError(
            f"island {rank.name} holds version {packet.number} with digest {digest}, "
            f"the synchronizer published {packet.digest}"
        )
    fields = {"version": packet.number, "fragment": packet.fragment, "digest": digest}
    rank.emit("adopted", {**fields, "wait_s": round(rank.clock() - began, 4)})


def tokens_of(batch: np.ndarray) -> int:
    """Tokens that a batch [B, T + 1] predicts."""
    return batch.shape[0] * (batch.shape[1] - 1)


class OuterPhase:
    """DiLoCo: inner steps alone, then `delta = base - local` of the period (DESIGN section 4)."""

    name = "outer"

    def __init__(
        self, rank: IslandRank, version: int, base: dict[str, torch.Tensor], steps_since: int = 0
    ) -> None:
        self.rank, self.version, self.base, self.steps_since = rank, version, base, steps_since
        self._pace = Pace(known(rank.job.outer.sync_every), fragments=1, overlap_steps=0)

    def take_step(self, batch: np.ndarray, positions: tuple[int, int], lr: float) -> Stepped:
        """Forward, backward, clip, AdamW."""
        inner = self.rank.inner
        loss = inner.gradient(batch)
        grad_norm = inner.clip()
        inner.step(lr)
        self.steps_since += 1
        return Stepped(float(loss.total), loss.tokens, tokens_of(batch), grad_norm)

    def is_due(self) -> bool:
        """After every `sync_every` inner steps."""
        return bool(self._pace.adoptions_at(self.steps_since))

    def may_stop(self) -> bool:
        """At any time: its checkpoint holds the progress since the version."""
        return True

    def synchronise(self) -> Packet:
        """Send the delta, wait for the next version, adopt it."""
        rank = self.rank
        held = RangeSet.from_json(rank.group.share(lambda: rank.feed.held.to_json()))
        with torch.no_grad():
            delta = {name: self.base[name] - rows for name, rows in rank.local().items()}
        part = Part(
            member=rank.me,
            kind="delta",
            fragment=0,
            seq=self.version,
            base_version=self.version,
            from_step=rank.step - self.steps_since,
            to_step=rank.step,
            tokens=rank.tokens,
            steps=self.steps_since,
            ranges=held,
            rows=Wire("fp32", {}),
            loss_sum=rank.loss_sum,
            finite=all(bool(torch.isfinite(rows).all()) for rows in delta.values()),
        )
        began = rank.clock()
        sending = rank.sender.submit(self._send, part, delta)
        rank.settle(lambda: sending.result(timeout=rank.job.outer.sync_timeout_s))
        packet = await_packet(rank, "version", self.version + 1)
        self._adopt(packet)
        adopted(rank, packet, self.base, began)
        return packet

    def _send(self, part: Part, delta: dict[str, torch.Tensor]) -> Receipt:
        # A non-finite delta is announced, not sent: the synchronizer refuses it by name.
        if part.finite:
            part = dataclasses.replace(part, rows=pack(self.rank.placed(delta), self.rank.job.outer.codec_up))
        return self.rank.link.offer(part)

    def _adopt(self, packet: Packet) -> None:
        """`local = base = published_new` (overlap 0, alpha 0: classic DiLoCo)."""
        rank, news = self.rank, self.rank.own_rows(packet.tensors)
        with torch.no_grad():
            for name, local in rank.local().items():
                # A packet is a step from the version before (decode, then add), or the whole.
                self.base[name] = news[name] if packet.base_version == -1 else self.base[name] + news[name]
                local.copy_(self.base[name])
        self.version, self.steps_since = packet.number, 0
        rank.feed.hand_in()


class SynchronousPhase:
    """Data parallel across islands: the merged mean gradient, stepped by identical AdamW.

    All islands hold the same bits all the time, so a version is not sent back: after a stretch of
    steps one island hands its parameters and moments to the synchronizer (the *anchor*), all hand
    in digests, and the durable anchor is the new version.
    """

    name = "synchronous"

    def __init__(self, rank: IslandRank, version: int, gradient_step: int) -> None:
        self.rank, self.version, self.steps_since = rank, version, 0
        self._gradient_step = gradient_step
        self._anchor_due = False

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
        return Stepped(float(loss.total), loss.tokens, tokens_of(batch), packet.grad_norm)

    def is_due(self) -> bool:
        """When the synchronizer asked for an anchor with the last gradient."""
        return self._anchor_due

    def may_stop(self) -> bool:
        """Between stretches only: what the islands do in a stretch becomes durable with its anchor."""
        return self.steps_since == 0

    def synchronise(self) -> Packet:
        """Hand in the digest, and the tensors if this island is the donor; adopt the new version."""
        rank, began = self.rank, self.rank.clock()
        part = self._part("anchor", self.version + 1, rank.tokens, RangeSet(), rank.loss_sum)
        own = [partial_digest(rank.placed(rank.local())), partial_digest(self._moments())]
        part = dataclasses.replace(part, partial_digest=tuple(torch.cat(own).tolist()))
        rank.settle(lambda: rank.link.offer(part))
        packet = await_reply(rank, "version", self.version + 1)
        if isinstance(packet, Donate):
            whole = dataclasses.replace(part, rows=self._state())
            rank.settle(lambda: rank.link.offer(whole))
            packet = await_packet(rank, "version", self.version + 1)
        adopted(rank, packet, rank.local(), began)
        self.version, self.steps_since, self._anchor_due = packet.number, 0, False
        rank.feed.hand_in()
        return packet

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
