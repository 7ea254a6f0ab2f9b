"""DiLoCo and its successors on one rank: inner steps alone, fragments exchanged in the background.

Per fragment (DESIGN section 4): a snapshot is taken `overlap_steps` before the fragment is due; its
delta is encoded and sent, the new version received and decoded on background threads; right after the
due step all ranks adopt it. With overlap 0 the three happen in a row, which is classic DiLoCo. The inner
loop waits only if the version is not there at its due step: that wait is `stall_s`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.base.errors import DeadlineError
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Basis, Entry, Packet, Part, Receipt, Wanted
from elastic.exchange.wire import Wire, pack
from elastic.policy.pacing import Pace
from elastic.runtime.island_rank import IslandRank, StopAsked
from elastic.runtime.island_store import Saved
from elastic.runtime.phase import POLL_S, Stepped, adopted, tokens_of
from elastic.runtime.progress import Progress, Since, UnderWay
from elastic.training.digest import finish_digest, partial_digest
from elastic.training.outer import adopt_blend, adopt_keep_progress

Tensors = dict[str, torch.Tensor]
LOOK_S = 0.25
"""Seconds between two looks whether somebody wants the run to stop."""


@dataclass(frozen=True)
class Arrival:
    """A version that came in: this rank's rows of it, and their partial digest."""

    packet: Packet
    rows: Tensors
    partial: torch.Tensor


@dataclass
class Flight:
    """A contribution under way, and what has become of it."""

    header: UnderWay
    snapshot: Tensors
    """This rank's rows at the snapshot; with overlap 0 the parameters themselves."""
    receipt: Future[Receipt]
    arrival: Future[Arrival]


class OuterPhase:
    """Inner steps alone, then `delta = base - snapshot` of a fragment (2311.08105, 2501.18512)."""

    name = "outer"

    def __init__(self, rank: IslandRank, base: Tensors, progress: Progress) -> None:
        """`base`: this rank's rows of the published values at `progress.versions`."""
        self.rank, self.base = rank, base
        self.versions = list(progress.versions)
        self._pace = pace_of(rank)
        self._position, self._start = progress.position, progress.start
        self._since, self._ahead = list(progress.since), list(progress.ahead)
        self._counted = rank.step - progress.uncounted
        """Own step through which the committed tokens of `rank.basis` count."""
        self._sent_at = dict.fromkeys(progress.sent_now, progress.position)
        self._adopted_at = dict.fromkeys(progress.adopted_now, progress.position)
        self._missed = progress.missed
        self._flights: dict[int, Flight] = {}
        self._over = threading.Event()

    @classmethod
    def begin(
        cls, rank: IslandRank, base: Tensors, versions: Sequence[int], last_fragment: int = -1
    ) -> OuterPhase:
        """In phase with the others: the fragment after the newest outer step's (-1: none yet) is due next."""
        pace = pace_of(rank)
        start = pace.position_after(last_fragment) if last_fragment >= 0 else 0
        phase = cls(rank, base, Progress(list(versions), position=start, start=start))
        for fragment in pace.late_snapshots(start):
            phase._send(fragment)  # empty-handed, so that nobody waits for a contribution
        return phase

    @classmethod
    def resume(cls, rank: IslandRank, entry: Entry, base: Tensors, saved: Saved) -> OuterPhase:
        """Go on from a checkpoint; what was under way is sent again unless it was merged meanwhile."""
        phase = cls(rank, base, saved.progress)
        merged = [sent for sent in saved.progress.under_way if sent.fragment in entry.merged]
        last = max(merged, key=lambda sent: sent.to_step, default=None)
        for header in saved.progress.under_way:
            rows = {name: saved.snapshots[name] for name in rank.fragments[header.fragment]}
            snapshot = {name: held.to(base[name].device) for name, held in rows.items()}
            if header.fragment in entry.merged:
                phase._flights[header.fragment] = phase._merged_flight(
                    header, snapshot, entry, entry.basis if header is last else known(rank.basis)
                )
            else:
                phase._launch(header, snapshot)
        return phase

    # -------------------------------------------------------------------------------- stepping

    @property
    def version(self) -> int:
        """That every fragment has reached."""
        return min(self.versions)

    @property
    def steps_since(self) -> int:
        """Own inner steps that the committed tokens of the island's basis do not count."""
        return self.rank.step - self._counted

    def take_step(self, batch: np.ndarray, positions: tuple[int, int], lr: float) -> Stepped:
        """Forward, backward, clip, AdamW."""
        inner = self.rank.inner
        loss = inner.gradient(batch)
        grad_norm = inner.clip()
        inner.step(lr)
        stepped = Stepped(float(loss.total), loss.tokens, tokens_of(batch), grad_norm)
        self._position += 1
        for since in self._since:
            since.steps += 1
            since.tokens += stepped.tokens
            since.loss_sum += stepped.loss_sum
        self._ahead = [ahead + 1 for ahead in self._ahead]
        return stepped

    def is_due(self) -> bool:
        """Whether a fragment's snapshot or its adoption falls on the step taken last."""
        return bool(self._snapshots() or self._adoptions())

    def may_stop(self) -> bool:
        """At any time: its checkpoint holds the progress since the versions, and what is under way."""
        return True

    def synchronise(self) -> Iterator[Packet]:
        """Take the snapshots and adopt the versions that are due now; each version adopted."""
        if not self._pace.overlap_steps:
            self._send_due()
        for fragment in self._adoptions():
            yield self._adopt(fragment)
        if self._pace.overlap_steps:  # after adopting: with a whole period both fall on one step
            self._send_due()

    def flush(self) -> Iterator[Packet]:
        """Hand in all there is, every fragment at once, and adopt what it leads to."""
        for fragment in range(len(self.versions)):
            if fragment not in self._flights:
                self._send(fragment)
        for fragment in sorted(self._flights, key=lambda each: self._flights[each].header.to_step):
            yield self._adopt(fragment)
        if self.rank.group.share(
            lambda: any(self.rank.feed.held)
        ):  # snapshots that were under way had left something behind
            yield from self.flush()

    def abandon(self) -> None:
        """The island goes on from other parameters: whatever is under way is let go, nothing more is sent."""
        self._over.set()
        receipts = [flight.receipt for flight in self._flights.values()]
        wait(receipts, timeout=self.rank.job.outer.sync_timeout_s)

    def progress(self) -> Progress:
        """For a checkpoint."""
        position = self._position
        return Progress(
            versions=list(self.versions),
            position=position,
            start=self._start,
            since=list(self._since),
            ahead=list(self._ahead),
            uncounted=self.steps_since,
            held=list(self.rank.feed.held),
            under_way=[flight.header for flight in self._flights.values()],
            sent_now=[fragment for fragment, at in self._sent_at.items() if at == position],
            adopted_now=[fragment for fragment, at in self._adopted_at.items() if at == position],
            missed=self._missed,
            basis=self.rank.basis,
        )

    def snapshots(self) -> Tensors:
        """Values at the snapshots of what is under way, for a checkpoint."""
        return {name: rows for flight in self._flights.values() for name, rows in flight.snapshot.items()}

    @contextmanager
    def outer_values(self) -> Iterator[None]:
        """The adopted outer parameters in the model for a while, to be judged."""
        local = self.rank.local()
        with torch.no_grad():
            kept = {name: rows.clone() for name, rows in local.items()}
            for name, rows in local.items():
                rows.copy_(self.base[name])
            try:
                yield
            finally:
                for name, rows in local.items():
                    rows.copy_(kept[name])

    # --------------------------------------------------------------------------------- sending

    def _snapshots(self) -> list[int]:
        due = self._pace.snapshots_at(self._position, self._start)
        return [p for p in due if p not in self._flights and self._sent_at.get(p) != self._position]

    def _adoptions(self) -> list[int]:
        # What a flush has handed in out of turn, and adopted, is not under way at its due step.
        due = self._pace.adoptions_at(self._position, self._start)
        return [p for p in due if p in self._flights and self._adopted_at.get(p) != self._position]

    def _send_due(self) -> None:
        for fragment in self._snapshots():
            self._send(fragment)

    def _send(self, fragment: int) -> None:
        """Take the snapshot of a fragment; the rest happens in the background."""
        rank, since = self.rank, self._since[fragment]
        header = UnderWay(
            fragment=fragment,
            generation=rank.me.generation,
            seq=self.versions[fragment],
            base_version=self.versions[fragment],
            from_step=rank.step - since.steps,
            to_step=rank.step,
            tokens=since.tokens,
            steps=since.steps,
            ranges=self._shared_hand_in(fragment),
            loss_sum=since.loss_sum,
        )
        self._since[fragment] = Since()
        self._sent_at[fragment] = self._position
        local = rank.local()
        snapshot = {name: local[name] for name in rank.fragments[fragment]}
        if self._pace.overlap_steps:
            snapshot = {name: rows.clone() for name, rows in snapshot.items()}
        self._launch(header, snapshot)

    def _shared_hand_in(self, fragment: int) -> RangeSet:
        """The positions of the contribution, which rank 0 knows; all ranks send the same header."""
        shared = self.rank.group.share(lambda: self.rank.feed.hand_in(fragment).to_json())
        if self.rank.group.rank != 0:
            self.rank.feed.hand_in(fragment)
        return RangeSet.from_json(shared)

    def _launch(self, header: UnderWay, snapshot: Tensors) -> None:
        rank = self.rank
        receipt = rank.sender.submit(self._offer, header, snapshot)
        arrival = rank.receiver.submit(self._receive, header, receipt)
        self._flights[header.fragment] = Flight(header, snapshot, receipt, arrival)

    def _offer(self, header: UnderWay, snapshot: Tensors) -> Receipt:
        """Encode and send the delta. Runs on the sending thread."""
        rank = self.rank
        if self._over.is_set():
            return Receipt("refused", "the island goes on from other parameters")
        with torch.no_grad():
            delta = {name: self.base[name] - rows for name, rows in snapshot.items()}
            placed = rank.placed(delta)
            square = math.fsum(float(torch.linalg.vector_norm(rows)) ** 2 for _, rows in placed.values())
            finite = math.isfinite(square) or all(bool(rows.isfinite().all()) for _, rows in placed.values())
            # A non-finite delta is announced, not sent: the synchronizer refuses it by name.
            rows = pack(placed, known(rank.job.outer.codec_up)) if finite else Wire("fp32", {})
        steps_left = self._pace.overlap_steps
        part = Part(
            member=rank.me,
            kind="delta",
            fragment=header.fragment,
            seq=header.seq,
            base_version=header.base_version,
            from_step=header.from_step,
            to_step=header.to_step,
            tokens=header.tokens,
            steps=header.steps,
            ranges=header.ranges,
            rows=rows,
            loss_sum=header.loss_sum,
            finite=finite,
            square_norm=square if finite else 0.0,
            slack_s=steps_left * rank.step_s if steps_left else math.inf,
        )
        return rank.link.offer(part)

    # ------------------------------------------------------------------------------- receiving

    def _receive(self, header: UnderWay, receipt: Future[Receipt]) -> Arrival:
        """Wait for the version that the contribution leads to. Runs on a receiving thread."""
        receipt.result()  # what sending raised is raised here too, and the main thread sees it first
        return self._fetch("version", header.fragment, header.base_version + 1)

    def _fetch(self, kind: Wanted, fragment: int, number: int) -> Arrival:
        rank, limit_s = self.rank, self.rank.job.outer.sync_timeout_s
        began = rank.clock()
        while not self._over.is_set() and rank.clock() - began < limit_s:
            packet = rank.link.fetch(rank.me, kind, fragment, number, POLL_S)
            if isinstance(packet, Packet):
                if packet.base_version in (-1, self.versions[fragment]):
                    return self._decoded(packet)
                kind, number = "whole", packet.number  # a version was missed: the step does not fit
        raise DeadlineError(
            f"island {rank.name} waited too long for version {number} of fragment {fragment}",
            saw=f"outer.sync_timeout_s = {limit_s:g}",
            fix="`elastic status RUN` names the island that does not contribute",
        )

    def _decoded(self, packet: Packet) -> Arrival:
        """Apply a packet to the base: decode, then add (DESIGN section 4, "Codec")."""
        rank, names = self.rank, self.rank.fragments[packet.fragment]
        with torch.no_grad():
            rows = rank.own_rows(packet.tensors, names=names)
            if packet.base_version != -1:
                rows = {name: self.base[name] + step for name, step in rows.items()}
            return Arrival(packet, rows, partial_digest(rank.placed(rows)))

    def _merged_flight(self, header: UnderWay, snapshot: Tensors, entry: Entry, basis: Basis) -> Flight:
        """What was under way is in the current version already, and the entry brought that version.

        `basis`: the entry's, which counts all that was merged meanwhile, with the last of them only.
        """
        fragment, receipt, arrival = header.fragment, Future[Receipt](), Future[Arrival]()
        rows = {name: self.base[name] for name in self.rank.fragments[fragment]}
        partial = partial_digest(self.rank.placed(rows))
        packet = Packet(
            number=entry.versions[fragment],
            fragment=fragment,
            base_version=-1,
            tensors=Wire("fp32", {}),
            digest=finish_digest(self.rank.group.sum(partial)),  # the whole was checked on entering
            basis=basis,
            merged={self.rank.name: (header.generation, header.seq)},
        )
        receipt.set_result(Receipt("accepted"))
        arrival.set_result(Arrival(packet, rows, partial))
        return Flight(header, snapshot, receipt, arrival)

    # -------------------------------------------------------------------------------- adopting

    def _adopt(self, fragment: int) -> Packet:
        """Wait for the version if it is not there, and mix it with the local values."""
        rank, flight, began = self.rank, self._flights[fragment], self.rank.clock()
        limit_s = rank.job.outer.sync_timeout_s
        rank.settle(lambda: flight.receipt.result(timeout=limit_s))
        arrival = self._await(flight)
        packet = arrival.packet
        header, since = flight.header, self._since[fragment]
        seq = packet.merged.get(rank.name, (0, -1))[1]
        self._mix(fragment, arrival.rows, flight.snapshot, included=seq >= header.seq)
        if seq >= header.seq:
            self._ahead[fragment] = since.steps
        else:
            self._missed = self._missed | header.ranges
            if seq >= 0:
                self._ahead[fragment] = since.steps + header.steps
        if packet.basis is not rank.basis:
            self._counted = rank.step - max(self._ahead)
        self.versions[fragment] = packet.number
        self.base.update(arrival.rows)
        self._adopted_at[fragment] = self._position
        del self._flights[fragment]
        stall_s = rank.clock() - began
        rank.stall_s += stall_s
        digest = finish_digest(rank.group.sum(arrival.partial))
        dropped = self._dropped(since.steps, header.steps, seq >= header.seq)
        adopted(rank, packet, fragment, digest, stall_s, dropped)
        return packet

    def _await(self, flight: Flight) -> Arrival:
        """The same version on all ranks: rank 0's. Raises StopAsked when the run ends meanwhile."""
        rank, limit_s, began = self.rank, self.rank.job.outer.sync_timeout_s, self.rank.clock()
        fragment = flight.header.fragment

        def decide() -> dict[str, Any]:
            while rank.clock() - began < limit_s:
                if flight.arrival.done():
                    return {"number": flight.arrival.result().packet.number}
                if rank.stop_asked():
                    return {"stop": True}
                wait([flight.arrival], timeout=LOOK_S)
            flight.arrival.result(timeout=POLL_S)  # it has a deadline of its own, with a name
            return {}

        def as_agreed() -> Arrival:
            own = flight.arrival.result(timeout=limit_s)
            number = outcome["number"]
            return own if own.packet.number == number else self._exactly(fragment, number)

        outcome = rank.agree(decide)
        if "stop" in outcome:
            raise StopAsked
        return rank.everyone(as_agreed)

    def _exactly(self, fragment: int, number: int) -> Arrival:
        """Another rank of the island holds this version, so this one must as well."""
        arrival = self._fetch("version", fragment, number)
        if arrival.packet.number != number:
            raise RuntimeError(f"version {number} of fragment {fragment} is gone before all ranks held it")
        return arrival

    @torch.no_grad()
    def _mix(self, fragment: int, published: Tensors, snapshot: Tensors, included: bool) -> None:
        outer, local = self.rank.job.outer, self.rank.local()
        here = {name: local[name] for name in self.rank.fragments[fragment]}
        if included and outer.mix == "blend":
            adopt_blend(here, published, known(outer.alpha))
        else:
            adopt_keep_progress(here, published, snapshot)

    def _dropped(self, steps_since: int, steps_sent: int, included: bool) -> float:
        """Share of the update since the base that a blend gives up, in inner steps."""
        outer = self.rank.job.outer
        if not included or outer.mix != "blend" or not steps_since:
            return 0.0
        return (1.0 - known(outer.alpha)) * steps_since / (steps_since + steps_sent)


def pace_of(rank: IslandRank) -> Pace:
    """The timing of the island's fragments."""
    outer = rank.job.outer
    return Pace(known(outer.sync_every), len(rank.fragments), known(outer.overlap_steps))
