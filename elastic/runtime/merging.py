"""The synchronizer's jobs: merge deltas, merge gradients, take an anchor, record a validation.

`next_job` decides, under the lock, what is due; the job then works without the lock on tensors that
only this thread touches, makes the result durable, and publishes under the lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic.base.events import ALL_FRAGMENTS
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Judgement, Member, Packet, Part
from elastic.exchange.wire import Wire, pack_encoded, to_encoded, unpack
from elastic.policy.evaluation import EvaluationQueue
from elastic.policy.rounds import Merge
from elastic.runtime.board import Anchor, Board, Stretch
from elastic.runtime.recorder import Recorder
from elastic.state.outer_store import OuterStore
from elastic.state.replay import turns_of
from elastic.training.assemble import assemble
from elastic.training.digest import LANES, digest, finish_digest
from elastic.training.merge import Encoded, MergeKind, merge
from elastic.training.outer import delta_norm

Job = Callable[[], None]
EVALUATION_CHUNK = 64
"""Held-out sequences that an island judges at a time at the end."""


class Merging:
    """Decides and does one job at a time; `busy` while one is between its decision and its end."""

    def __init__(
        self,
        board: Board,
        store: OuterStore,
        recorder: Recorder,
        lock: threading.Condition,
        clock: Callable[[], float],
    ) -> None:
        self._board, self._store, self._recorder = board, store, recorder
        self._lock, self._clock = lock, clock
        self._judgements: deque[tuple[Member, Judgement]] = deque()
        self._shapes = store.shapes
        self._embeddings = frozenset(name for name in self._shapes if "embed" in name)
        self.busy = False
        self._finish_if_complete()

    # -------------------------------------------------------------------------------- deciding

    def next_job(self) -> Job | None:
        """The next thing to do, or None. The caller holds the lock."""
        board, live = self._board, self._board.membership.live
        job: Job | None = None
        if self._judgements:
            member, judgement = self._judgements.popleft()
            job = self._validation(member, judgement)
        elif board.phase == "outer":
            if (due := self._due_fragment()) is not None:
                job = self._delta(due, *self._take(due))
        elif board.anchor is not None:
            if board.anchor.is_complete(live):
                job = self._anchor(board.anchor, board.stretch)
        elif (due := board.gradients.close(0, board.quorum)) is not None:
            job = self._gradient(due, *self._take(due))
        self.busy = job is not None
        return job

    def _due_fragment(self) -> Merge | None:
        """The first fragment whose round closes now, beginning after the one that came last."""
        board, count = self._board, self._board.fragments
        for offset in range(count):
            fragment = (self._store.last_fragment + 1 + offset) % count
            due = board.rounds.close(fragment, board.quorum, self._clock())
            if due is not None:
                return due
        return None

    def judged(self, member: Member, judgement: Judgement) -> None:
        """A result came in. The caller holds the lock."""
        queue = self._board.evaluation
        if judgement.final and queue is not None and queue.version == judgement.version:
            news = queue.done(
                member.island, judgement.start, judgement.stop, judgement.loss_sum, judgement.tokens
            )
            if not news or not queue.finished:
                return
            judgement = Judgement(
                judgement.version, 0, queue.total, queue.mean_loss * queue.tokens, queue.tokens, True
            )
        self._judgements.append((member, judgement))

    def _take(self, due: Merge) -> tuple[list[dict[int, Part]], RangeSet]:
        """The parts of a merge, and what it commits; from here on the ledger counts them as merged."""
        board = self._board
        committed = RangeSet()
        for header in due.contributions:
            # A gradient goes into all fragments at once.
            gradient = header.kind == "gradient"
            for fragment in range(board.fragments) if gradient else [due.fragment]:
                ranges = board.ledger.merge(header.island, header.generation, fragment, header.ranges)
                committed = committed | ranges
        for header in due.contributions:
            if board.membership.fence(header.island, header.generation) is not None:
                # Its incarnation is over: what no open round will take in goes back to the queue.
                keep = board.rounds.pending_ranges(header.island)
                board.ledger.release(header.island, header.generation, keep=keep)
        for dropped in due.dropped:
            board.parts.pop(dropped, None)
        return [board.parts.pop(header.id) for header in due.contributions], committed

    # ----------------------------------------------------------------------------------- doing

    def _mean(
        self, due: Merge, parts: list[dict[int, Part]], shapes: Mapping[str, tuple[int, ...]], kind: MergeKind
    ) -> dict[str, torch.Tensor] | None:
        """The contributions as one delta or gradient; None if nobody trained."""
        if not due.moves:
            return None
        used = [(part, weight) for part, weight in zip(parts, due.weights, strict=True) if weight > 0]
        return merge(
            [encoded_of(ranks) for ranks, _ in used],
            [weight for _, weight in used],
            shapes,
            kind,
            self._embeddings,
        )

    def _delta(self, due: Merge, parts: list[dict[int, Part]], committed: RangeSet) -> Job:
        def work() -> None:
            board, store, began = self._board, self._store, self._clock()
            outer, fragment = board.setup.job.outer, due.fragment
            codec = known(outer.codec_down)
            shapes = {name: self._shapes[name] for name in store.states[fragment].theta}
            merged = self._mean(due, parts, shapes, outer.merge)
            entries = contributions_of(due)
            packet = store.commit_outer(fragment, due.version, entries, committed, merged, due.scale)
            losses = {
                header.island: sum(part.loss_sum for part in ranks.values()) / max(header.tokens, 1)
                for header, ranks in zip(due.contributions, parts, strict=True)
            }
            size = delta_norm(merged) if merged is not None else 0.0
            with self._lock:
                base = -1 if codec == "fp32" else due.version - 1
                wire = pack_encoded(packet, codec)
                self._let_in()
                self._publish(
                    fragment, due.version, base, wire, store.digests[fragment], losses, turns_of(entries)
                )
                self._published()
                standing = self._standing(fragment, due.version)
                self._tell(standing, "outer", losses, due.tokens, size, self._clock() - began)

        return work

    def _gradient(self, due: Merge, parts: list[dict[int, Part]], committed: RangeSet) -> Job:
        board = self._board
        for header, ranks in zip(due.contributions, parts, strict=True):
            board.stretch.add(header, sum(part.loss_sum for part in ranks.values()))
        board.stretch.steps += 1
        flagged = self._wants_anchor()
        if flagged:
            board.anchor = Anchor([header.island for header in due.contributions])

        def work() -> None:
            merged = self._mean(due, parts, self._shapes, "mean")
            if merged is None:
                merged = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
            tensors, size = pack_encoded(merged, "fp32"), delta_norm(merged)
            with self._lock:
                packet = Packet(
                    number=due.version,
                    fragment=0,
                    base_version=-1,
                    tensors=tensors,
                    digest="",
                    basis=board.basis,
                    grad_norm=size,
                    anchor=flagged,
                    phase="synchronous",
                )
                board.packets["gradient", 0].append(packet)
                self.busy = False
                self._lock.notify_all()

        return work

    def _wants_anchor(self) -> bool:
        """Whether the stretch ends with this step: its length, the end of the phase, or a need."""
        board = self._board
        committed = board.ledger.committed_count
        return (
            board.stretch.steps >= known(board.setup.job.outer.sync_every)
            or board.phase_for(committed) == "outer"
            or board.ledger.done
            or bool(board.stopping)
            or bool(board.admissible)
        )

    def _anchor(self, anchor: Anchor, stretch: Stretch) -> Job:
        board = self._board
        live = board.membership.live
        donor = known(anchor.donor(live))
        parts = anchor.rows[donor]
        digests = {name: island_digests(anchor.digests[name]) for name in anchor.expected if name in live}
        version = board.version + 1

        def work() -> None:
            store, began = self._store, self._clock()
            shapes = dict(self._shapes)
            for moment in ("exp_avg", "exp_avg_sq"):
                shapes |= {f"{moment}/{name}": shape for name, shape in self._shapes.items()}
            rows = [unpack(known(parts[rank].rows), shapes) for rank in sorted(parts)]
            whole = assemble(rows, shapes)
            parameters = {name: whole.pop(name) for name in self._shapes}
            committed = RangeSet()
            for ranges in stretch.ranges.values():
                committed = committed | ranges
            phase = board.phase_for(len(store.committed | committed))
            contributions = anchor_contributions(stretch, board, version)
            store.commit_anchor(version, contributions, committed, parameters, whole, stretch.steps, phase)
            right = (store.digest, digest(store.moments))
            with self._lock:
                for name, seen in digests.items():
                    if seen != right:
                        what = "parameters" if seen[0] != right[0] else "moments"
                        why = f"its {what} at version {version} are not those of island {donor}"
                        board.membership.fail(name, board.membership.generations[name], why)
                board.anchor, board.stretch, board.anchor_step = None, Stretch(), board.gradient_step
                for fragment in range(board.fragments):
                    board.rounds.advance(fragment, version)
                changed = phase != board.phase
                board.phase = phase
                losses = {n: stretch.losses[n] / max(stretch.tokens[n], 1) for n in sorted(stretch.losses)}
                self._let_in()
                for fragment in range(board.fragments):
                    self._publish(fragment, version, version - 1, Wire("fp32", {}), store.digest, losses, {})
                self._published()
                tokens = sum(stretch.tokens.values())
                standing = self._standing(ALL_FRAGMENTS, version)
                self._tell(standing, "synchronous", losses, tokens, 0.0, self._clock() - began)
                if changed:
                    fields = {"phase": phase, "version": version, "digest": store.digest}
                    self._recorder.emit("phase_changed", {**fields, "islands": sorted(digests)})

        return work

    def _validation(self, member: Member, judgement: Judgement) -> Job:
        def work() -> None:
            board = self._board
            loss = judgement.loss_sum / max(judgement.tokens, 1)
            result = {
                "version": judgement.version,
                "loss": loss,
                "nats_per_byte": loss * board.setup.tokens_per_byte,
                "sequences": judgement.stop - judgement.start,
                "final": judgement.final,
            }
            self._store.commit_validation(result)
            with self._lock:
                self._recorder.emit("validated", result)
                self._finish_if_complete()
                self.busy = False
                self._lock.notify_all()

        return work

    # ------------------------------------------------------------------------------ publishing

    def _let_in(self) -> None:
        """A version boundary: waiting islands take part from here on. The caller holds the lock."""
        for name in self._board.admissible:
            self._board.let_in(name)
        self._board.refresh_basis()

    def _publish(
        self,
        fragment: int,
        version: int,
        base_version: int,
        tensors: Wire,
        digest: str,
        contributors: Iterable[str],
        merged: Mapping[str, tuple[int, int]],
    ) -> None:
        """Make a durable version of a fragment visible. The caller holds the lock."""
        board, store = self._board, self._store
        board.durable = store.committed
        board.merged_version |= dict.fromkeys(contributors, int(store.counters["outer_steps"]) + version)
        last = fragment == board.fragments - 1
        packet = Packet(
            number=version,
            fragment=fragment,
            base_version=base_version,
            tensors=tensors,
            digest=digest,
            basis=board.basis,
            phase=board.phase,
            evaluate=self._judge_of(version) if last else "",
            merged=merged,
        )
        board.packets["version", fragment].append(packet)

    def _published(self) -> None:
        """All of a job's versions are visible. The caller holds the lock."""
        self._store.counters["replayed_sequences"] = self._board.ledger.replayed_sequences
        self._finish_if_complete()
        self.busy = False
        self._lock.notify_all()

    def _judge_of(self, version: int) -> str:
        """The island that judges this version: in turn; none at the end, where all of them do."""
        board, every = self._board, self._board.setup.job.validation.every
        live = board.membership.live
        if version % every or not live or len(self._store.committed) == board.setup.total_sequences:
            return ""
        return live[version // every % len(live)]

    def _finish_if_complete(self) -> None:
        """All committed: judge the last version on all held-out sequences, then the run is done."""
        board, store = self._board, self._store
        if len(store.committed) < board.setup.total_sequences:
            return
        if any(done["final"] and done["version"] == board.version for done in store.validation):
            board.finished = True
        elif board.evaluation is None:
            held_out = board.setup.validation_sequences
            board.evaluation = EvaluationQueue(board.version, held_out, EVALUATION_CHUNK)

    def _tell(
        self,
        standing: dict[str, Any],
        phase: str,
        losses: dict[str, float],
        tokens: int,
        size: float,
        merge_s: float,
    ) -> None:
        fields = {"phase": phase, "islands": sorted(losses), "tokens": tokens, "merge_s": round(merge_s, 4)}
        fields |= {"losses": {name: round(loss, 6) for name, loss in losses.items()}}
        self._recorder.emit("outer_step", {**standing, **fields, "delta_norm": round(size, 6)})

    def show_standing(self) -> None:
        """Where a continued run stands, for views that begin with this attempt; it is no new fact."""
        fields = {"phase": self._board.phase, "islands": [], "losses": {}, "tokens": 0}
        fields |= {"delta_norm": 0.0, "merge_s": 0.0}
        standing = self._standing(ALL_FRAGMENTS, self._store.version)
        self._recorder.show("outer_step", {**standing, **fields})

    def _standing(self, fragment: int, version: int) -> dict[str, Any]:
        store = self._store
        return {
            "version": version,
            "fragment": fragment,
            "digest": store.digest if fragment == ALL_FRAGMENTS else store.digests[fragment],
            "committed_sequences": len(store.committed),
            "total_sequences": self._board.setup.total_sequences,
            "committed_tokens": int(store.counters["committed_tokens"]),
            "bytes_up": int(store.counters["bytes_up"]),
            "bytes_down": int(store.counters["bytes_down"]),
        }


def encoded_of(ranks: Mapping[int, Part]) -> Encoded:
    """A contribution as its ranks sent it: their rows, still encoded."""
    wires = [known(ranks[rank].rows) for rank in sorted(ranks)]
    parts = [
        {name: (start, to_encoded(array)) for name, (start, array) in wire.arrays.items()} for wire in wires
    ]
    return Encoded(wires[0].codec, parts)


def contributions_of(due: Merge) -> list[dict[str, Any]]:
    """The contributions of a merge as its record lists them."""
    return [
        {
            "id": header.id,
            "island": header.island,
            "generation": header.generation,
            "seq": header.seq,
            "base_version": header.base_version,
            "from_step": header.from_step,
            "to_step": header.to_step,
            "tokens": header.tokens,
            "steps": header.steps,
            "weight": weight,
            "ranges": header.ranges.to_json(),
        }
        for header, weight in zip(due.contributions, due.weights, strict=True)
    ]


def island_digests(sums: Mapping[int, Sequence[int]]) -> tuple[str, str]:
    """Digests of an island's parameters and of its moments, from the partial sums of its ranks."""
    total = torch.tensor([sums[rank] for rank in sorted(sums)]).sum(0)
    return finish_digest(total[:LANES]), finish_digest(total[LANES:])


def anchor_contributions(stretch: Stretch, board: Board, version: int) -> list[dict[str, Any]]:
    """What each island gave to a stretch of synchronous steps."""
    total = sum(stretch.tokens.values())
    return [
        {
            "id": f"{name}/{board.membership.generations[name]}/anchor/{version}",
            "island": name,
            "generation": board.membership.generations[name],
            "seq": version,
            "base_version": version - 1,
            "from_step": board.anchor_step,
            "to_step": board.anchor_step + stretch.island_steps[name],
            "tokens": stretch.tokens[name],
            "steps": stretch.island_steps[name],
            "weight": stretch.tokens[name] / total,
            "ranges": stretch.ranges[name].to_json(),
        }
        for name in sorted(stretch.tokens)
    ]
