"""The synchronizer: what islands and the controller can ask of it, and its one merging thread.

Calls of islands only look at the board and put parts on it, under one lock; they are short. The
thread looks for the next job (a merge that is due, an anchor that is complete, a validation that
came in), does the arithmetic and makes it durable without the lock (`elastic.runtime.merging`), and
publishes under it. This class knows no Ray; `elastic.runtime.actors` wraps it, benchmarks and tests
call it directly.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.base.errors import StorageError
from elastic.base.events import EventSink
from elastic.base.known import known
from elastic.exchange.link import (
    Beat,
    Command,
    Donate,
    Entry,
    FencedError,
    Hello,
    Judgement,
    Member,
    Packet,
    Part,
    Receipt,
    Snapshot,
    Work,
)
from elastic.exchange.wire import pack_encoded
from elastic.policy.rounds import Contribution
from elastic.runtime.board import Board, RunSetup
from elastic.runtime.handshake import check_hello, entry_of, header_of
from elastic.runtime.merging import Merging
from elastic.runtime.recorder import Recorder
from elastic.state.outer_store import OuterStore

TICK_S = 0.25


class Synchronizer:
    """Implements `exchange.link.Link` for islands, and a few calls for the controller."""

    def __init__(
        self,
        setup: RunSetup,
        store: OuterStore,
        parameters: str,
        events: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`parameters`: fingerprint of the trainable parameters' names and shapes."""
        self.setup, self.store, self._parameters, self._clock = setup, store, parameters, clock
        self._lock = threading.Condition()
        board = Board(setup, store.versions, "outer", store.committed, store.generations)
        board.phase = (
            store.phase
            if store.phase == "outer" and store.version
            else board.phase_for(board.ledger.committed_count)
        )
        store.phase = board.phase
        board.ledger.replayed_sequences = int(store.counters["replayed_sequences"])
        self.board = board
        self.recorder = Recorder(board, events)
        self._merging = Merging(board, store, self.recorder, self._lock, clock)
        if store.version:
            self._merging.show_standing()
        self._closing = threading.Event()
        self._last_tick = clock()
        # More often than `_note_losses` takes for a standstill of this process.
        self._tick_s = min(TICK_S, board.membership.timeout_s / 4)
        self._thread = threading.Thread(target=self._serve, name="elastic-merge", daemon=True)
        self._thread.start()

    # ================================================================ what islands ask (Link)

    def join(self, hello: Hello) -> int:
        """Begin an incarnation of an island; older ones are fenced from here on."""
        check_hello(hello, self.setup.islands, self._parameters, self.recorder.versions)
        with self._lock:
            board, name = self.board, hello.island
            self._note_losses()  # of the incarnation before, if it was given up a moment ago
            returned = board.forget(name)
            if board.membership.state(name) in ("live", "idle"):
                self.recorder.lost(name, "a new incarnation joined", len(returned))
            generation = board.membership.join(name, self._clock())
            board.membership.leave(name, generation, idle=True)  # until it is admitted
            for dropped in (*board.rounds.join(name, generation), *board.gradients.join(name, generation)):
                board.parts.pop(dropped, None)
            board.joined.add(name)
            board.rebasing.discard(name)
            board.waiting.add(name)
            board.workers[name] = hello.workers
            board.claim(hello, generation, self.store.merged_turns)
            self.store.generations[name] = generation
            self._lock.notify_all()
            return generation

    def enter(self, member: Member, hello: Hello, timeout_s: float) -> Entry | None:
        """The current version, once the island is admitted; None after `timeout_s`."""
        deadline = self._clock() + timeout_s
        with self._lock:
            while True:
                self._fence(member)
                board, name = self.board, member.island
                board.rebasing.discard(name)
                if board.membership.state(name) == "idle" and name not in board.waiting:
                    board.waiting.add(name)  # it was out of data and comes back
                    self._lock.notify_all()
                if name not in board.waiting and not self._merging.busy:
                    return self._entry(member, hello)
                left = deadline - self._clock()
                if left <= 0:
                    return None
                self._lock.wait(min(left, TICK_S))

    def lease(self, member: Member, versions: tuple[int, ...]) -> Work:
        """What the island does next."""
        with self._lock:
            self._fence(member)
            board, name, generation = self.board, member.island, member.generation
            board.claims.pop(name, None)  # all its ranks have entered
            if self._stop_now():
                return Work("stop")
            if board.finished:
                return Work("done")
            if board.evaluation is not None:
                if board.evaluation.finished:
                    return Work("wait")  # until the result is durable
                if versions != board.versions:
                    return Work("enter")
                chunk = board.evaluation.take(name, generation)
                return Work("evaluate", *chunk) if chunk else Work("wait")
            members = board.sharers
            if board.membership.state(name) == "idle":
                return Work("enter") if board.ledger.has_for(name, members) else Work("wait")
            granted = board.ledger.lease(name, generation, members)
            if granted is not None:
                return Work("batches", *granted)
            if board.ledger.held(name, generation):
                return Work("flush")
            if not board.ledger.done:
                board.membership.leave(name, generation, idle=True)
                self._lock.notify_all()
            return Work("wait")

    def offer(self, part: Part) -> Receipt:
        """Take one rank's rows."""
        with self._lock:
            self._fence(part.member)
            board, name = self.board, part.member.island
            if name in board.rebasing:  # it hears of that at its next due step
                return Receipt("refused", f"island {name} must start from the current version first")
            board.claims.pop(name, None)
            self._count_bytes("up", part.rows.nbytes if part.rows else 0)
            if part.kind == "anchor":
                return self._offer_anchor(part)
            rounds = board.rounds if part.kind == "delta" else board.gradients
            header = header_of(part)
            length = self._length(part, header)
            problem = "" if part.finite else "its values are not finite"
            if length is not None and not problem:
                problem = board.guard.judge(header.fragment, length)
            receipt = rounds.offer(
                header,
                part.member.rank,
                board.membership.live,
                problem,
                now=self._clock(),
                slack_s=part.slack_s,
            )
            for dropped in receipt.dropped:
                board.parts.pop(dropped, None)
            if receipt.status in ("accepted", "waiting-parts"):
                board.parts.setdefault(header.id, {})[part.member.rank] = part
            if receipt.status == "accepted" and length is not None:
                board.guard.accepted(name, header.fragment, length)
            if receipt.status == "refused":
                # It holds something the others do not: it waits for the next version and re-bases.
                self.recorder.refused(part.member, header.id, receipt.reason)
                for dropped in rounds.forfeit(name, part.member.generation):
                    board.parts.pop(dropped, None)
                returned = board.ledger.release(name, part.member.generation)
                board.membership.leave(name, part.member.generation, idle=True)
                board.waiting.add(name)
                board.rebasing.add(name)
                self.recorder.warn(f"{len(returned)} sequences of island {name} go back to the queue")
                if problem:
                    self._count_refusal(part.member, problem)
            self._lock.notify_all()
            return Receipt(receipt.status, receipt.reason)

    def _length(self, part: Part, header: Contribution) -> float | None:
        """Euclidean length of the contribution that this part completes; None while others are missing."""
        others = self.board.parts.get(header.id, {})
        if part.kind != "delta" or len(others) + 1 < header.parts or part.member.rank in others:
            return None
        return math.sqrt(part.square_norm + sum(other.square_norm for other in others.values()))

    def _count_refusal(self, member: Member, problem: str) -> None:
        """Its values were refused: after too many in a row the island takes part no longer."""
        board, name = self.board, member.island
        board.guard.refused(name)
        if not board.guard.is_quarantined(name):
            return
        fields = {"island": name, "generation": member.generation, "reason": problem}
        self.recorder.emit("quarantined", fields)
        if all(board.guard.is_quarantined(island) for island in self.setup.islands):
            self._fail(f"every island is quarantined; the last one, {name}: {problem}", storage=False)

    def _offer_anchor(self, part: Part) -> Receipt:
        board = self.board
        if board.anchor is None or part.seq != board.version + 1:
            return Receipt("refused", f"no anchor {part.seq} is wanted; version {board.version} is current")
        board.anchor.take(part)
        self._lock.notify_all()
        return Receipt("accepted")

    def fetch(
        self, member: Member, kind: str, fragment: int, number: int, timeout_s: float
    ) -> Packet | Donate | None:
        """Version `number` or a later one, or the merged gradient `number`; None after `timeout_s`."""
        deadline = self._clock() + timeout_s
        with self._lock:
            while True:
                self._fence(member)
                packet = self._packet(kind, fragment, number)
                if packet is not None:
                    self._count_bytes("down", packet.tensors.nbytes)
                    return packet
                anchor = self.board.anchor
                if (
                    kind == "version"
                    and anchor is not None
                    and anchor.donor(self.board.membership.live) == member.island
                ):
                    sent = anchor.rows.get(member.island, {})
                    if len(sent) < member.world_size and member.rank not in sent:
                        return Donate()
                left = deadline - self._clock()
                if left <= 0:
                    return None
                self._lock.wait(min(left, TICK_S))

    def _packet(self, kind: str, fragment: int, number: int) -> Packet | None:
        """The packet of this number, or the next later one there is."""
        if kind != "whole":
            return next((p for p in self.board.packets[kind, fragment] if p.number >= number), None)
        kept = self.board.packets["version", fragment]
        if not kept or kept[-1].number < number or self._merging.busy:
            return None  # while a merge is made durable, what is published is ahead of the records
        whole = pack_encoded(self.store.states[fragment].published, "fp32")
        return dataclasses.replace(kept[-1], base_version=-1, tensors=whole)

    def beat(self, member: Member, beat: Beat) -> Command:
        """A sign of life."""
        with self._lock:
            reason = self.board.membership.beat(member.island, member.generation, self._clock())
            if reason is not None:
                return Command(fenced=reason)
            self.recorder.progress(member, beat, self._clock())
            return Command(stop=self._stop_now())

    def judged(self, member: Member, judgement: Judgement) -> None:
        """A validation result came in."""
        with self._lock:
            self._fence(member)
            self._merging.judged(member, judgement)
            self._lock.notify_all()

    def leave(self, member: Member, reason: str, checkpoint: str = "") -> None:
        """The island ends in order; what it did not hand in goes back to the queue."""
        with self._lock:
            if self.board.membership.fence(member.island, member.generation) is not None:
                return
            if self.board.stopping and self.board.membership.state(member.island) == "live":
                self.board.stopped.add(member.island)
            self.board.forget(member.island)
            self.board.membership.leave(member.island, member.generation, why=reason)
            self.recorder.left(member, reason)
            self._lock.notify_all()

    # ===================================================================== what the controller asks

    def snapshot(self) -> Snapshot:
        """The state at this moment."""
        with self._lock:
            board, store = self.board, self.store
            newest = known(store.log.last).body  # what is in memory may not be durable yet
            return Snapshot(
                phase=board.phase,
                version=min(newest["versions"]),
                versions=tuple(newest["versions"]),
                counters=dict(store.counters),
                total_sequences=self.setup.total_sequences,
                committed_sequences=len(board.durable),
                live=tuple(board.membership.live),
                joined=tuple(sorted(board.joined)),
                beats=dict(board.beats),
                workers=dict(board.workers),
                merged_version=dict(board.merged_version),
                finished=board.finished,
                digest=newest["digest"],
                validation=store.validation[-1] if store.validation else {},
                failure=board.failure,
                storage_failed=board.storage_failed,
            )

    def events_since(self, cursor: int) -> tuple[int, list[dict[str, Any]]]:
        """Events after `cursor`, and the next cursor."""
        with self._lock:
            return self.recorder.since(cursor)

    def begin(self) -> None:
        """Start with the islands that have joined, without waiting for the rest."""
        with self._lock:
            self.board.begun = True
            self._lock.notify_all()

    def stop(self, reason: str) -> None:
        """Ask all islands to save themselves and end."""
        with self._lock:
            self.board.stopping = reason
            self._lock.notify_all()

    def declare_lost(self, island: str, reason: str) -> None:
        """The controller knows that an island died; nobody waits for it any longer."""
        with self._lock:
            generation = self.board.membership.generations.get(island, 0)
            if self.board.membership.fence(island, generation) is None:
                self.board.membership.fail(island, generation, reason)
                self._note_losses()
                self._lock.notify_all()

    def close(self, timeout_s: float = 60.0) -> None:
        """End the merging thread after what it is doing."""
        self._closing.set()
        with self._lock:
            self._lock.notify_all()
        self._thread.join(timeout=timeout_s)

    # ================================================================================= the thread

    def _serve(self) -> None:
        """Look, decide, do, record, until closed."""
        while not self._closing.is_set():
            try:
                with self._lock:
                    self._tick()
                    job = self._merging.next_job()
                    if job is None:
                        self._lock.wait(self._pause_s())
                        continue
                job()
            except StorageError as error:
                self._fail(str(error), storage=True)
            except Exception as error:  # the controller ends the run with this reason
                self._fail(f"{type(error).__name__}: {error}", storage=False)

    def _pause_s(self) -> float:
        """Until the next look: a tick, or less if the grace of a round ends before."""
        deadline = self.board.rounds.next_deadline()
        return self._tick_s if deadline is None else min(self._tick_s, max(deadline - self._clock(), 0.001))

    def _fail(self, reason: str, storage: bool) -> None:
        with self._lock:
            self.board.failure, self.board.storage_failed = reason, storage
            self._lock.notify_all()
        self._closing.set()

    def _tick(self) -> None:
        """What the passing of time decides: who is lost, who may enter."""
        self._note_losses()
        board = self.board
        if not board.begun and board.joined >= set(self.setup.islands):
            board.begun = True
        if board.stretch_open and not board.membership.live and not self._merging.busy:
            steps = board.roll_back()
            self.recorder.warn(f"no island is left in the synchronous phase: {steps} steps are redone")
        self._admit()

    def _note_losses(self) -> None:
        """Islands that are silent for too long, or given up: leases go back, nobody waits for them."""
        now, board = self._clock(), self.board
        self.recorder.account(now - self._last_tick, self.store.counters)
        if now - self._last_tick > board.membership.timeout_s / 2:
            # This process itself stood still: nobody could be heard, so nobody is late.
            for name in board.membership.members:
                board.membership.beat(name, board.membership.generations[name], now)
        self._last_tick = now
        for island in board.membership.expire(now):
            returned = board.forget(island)
            self.recorder.lost(island, board.membership.why(island), len(returned))

    def _admit(self) -> None:
        """Let waiting islands in: at a version boundary, with progress of their own, or if nobody works.

        Only `_tick` calls this, right before the next job is chosen: so nobody is let in at a version
        while an answered round is about to replace it.
        """
        board = self.board
        if not board.begun or self._merging.busy:
            return
        alone = not board.membership.live
        for name in board.admissible:
            # Otherwise the next publication lets it in (`Merging.publish`), so that nobody waits for it.
            if alone or board.evaluation is not None or board.finished or board.claims.get(name) is not None:
                board.let_in(name)
                self._lock.notify_all()
        if alone and board.membership.live:
            board.refresh_basis()

    # ================================================================================== helpers

    def _entry(self, member: Member, hello: Hello) -> Entry:
        board, store = self.board, self.store
        if member.rank == 0:
            self.recorder.entered(member, hello, store.digest)
        entry = entry_of(board, store, member, hello)
        self._count_bytes("down", entry.tensors.nbytes + (entry.moments.nbytes if entry.moments else 0))
        return entry

    def _stop_now(self) -> bool:
        """Stopping is asked for; in a synchronous stretch only after its anchor, to lose nothing."""
        board = self.board
        return bool(board.stopping) and not (board.stretch_open and board.membership.live)

    def _fence(self, member: Member) -> None:
        board = self.board
        if board.failure:
            raise RuntimeError(f"the synchronizer cannot go on: {board.failure}")
        reason = board.membership.fence(member.island, member.generation)
        if reason is not None:
            current = board.membership.generations.get(member.island, 0)
            raise FencedError(reason, superseded=member.generation < current)

    def _count_bytes(self, direction: str, count: int) -> None:
        self.store.counters[f"bytes_{direction}"] += count
        if self.board.phase == "synchronous":
            self.store.counters[f"bytes_{direction}_warmup"] += count
