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

from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Judgement, Member, Packet, Part
from elastic.exchange.wire import Wire, pack_encoded, unpack
from elastic.policy.evaluation import EvaluationQueue
from elastic.policy.rounds import Merge
from elastic.runtime.board import Anchor, Board, Stretch
from elastic.runtime.recorder import Recorder
from elastic.state.outer_store import OuterStore
from elastic.training.digest import LANES, digest, finish_digest
from elastic.training.outer import assemble, delta_norm, merge

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
        self._shapes = {name: tuple(value.shape) for name, value in store.state.theta.items()}
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
            if (due := board.rounds.close(0, board.quorum)) is not None:
                job = self._delta(due, *self._take(due))
        elif board.anchor is not None:
            if board.anchor.is_complete(live):
                job = self._anchor(board.anchor, board.stretch)
        elif (due := board.gradients.close(0, board.quorum)) is not None:
            job = self._gradient(due, *self._take(due))
        self.busy = job is not None
        return job

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
            committed = committed | board.ledger.merge(header.island, header.generation, 0, header.ranges)
        for dropped in due.dropped:
            board.parts.pop(dropped, None)
        return [board.parts.pop(header.id) for header in due.contributions], committed

    # ----------------------------------------------------------------------------------- doing

    def _mean(self, due: Merge, parts: list[dict[int, Part]]) -> dict[str, torch.Tensor] | None:
        """The weighted mean of the contributions; None if nobody trained."""
        if not due.moves:
            return None
        used = [(part, weight) for part, weight in zip(parts, due.weights, strict=True) if weight > 0]
        whole = [
            assemble([unpack(known(ranks[rank].rows)) for rank in sorted(ranks)], self._shapes)
            for ranks, _ in used
        ]
        return merge(whole, [weight for _, weight in used])

    def _delta(self, due: Merge, parts: list[dict[int, Part]], committed: RangeSet) -> Job:
        def work() -> None:
            board, store, began = self._board, self._store, self._clock()
            merged = self._mean(due, parts)
            codec = board.setup.job.outer.codec_down
            packet = store.commit_outer(due.version, contributions_of(due), committed, merged, due.scale)
            losses = {
                header.island: sum(part.loss_sum for part in ranks.values()) / max(header.tokens, 1)
                for header, ranks in zip(due.contributions, parts, strict=True)
            }
            size = delta_norm(merged) if merged is not None else 0.0
            with self._lock:
                base = -1 if codec == "fp32" else due.version - 1
                self._publish(due.version, base, pack_encoded(packet, codec), losses)
                self._tell(due.version, "outer", losses, due.tokens, size, self._clock() - began)

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
            merged = self._mean(due, parts)
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
                board.packets["gradient"].append(packet)
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
            or bool(board.waiting)
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
            rows = [unpack(known(parts[rank].rows)) for rank in sorted(parts)]
            shapes = dict(self._shapes)
            for moment in ("exp_avg", "exp_avg_sq"):
                shapes |= {f"{moment}/{name}": shape for name, shape in self._shapes.items()}
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
                board.rounds.advance(0, version)
                changed = phase != board.phase
                board.phase = phase
                losses = {n: stretch.losses[n] / max(stretch.tokens[n], 1) for n in sorted(stretch.losses)}
                self._publish(version, version - 1, Wire("fp32", {}), losses)
                tokens = sum(stretch.tokens.values())
                self._tell(version, "synchronous", losses, tokens, 0.0, self._clock() - began)
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

    def _publish(self, version: int, base_version: int, tensors: Wire, contributors: Iterable[str]) -> None:
        """Make a durable version visible, and let waiting islands in. The caller holds the lock."""
        board, store = self._board, self._store
        board.durable = store.committed
        board.merged_version |= dict.fromkeys(contributors, version)
        store.counters["replayed_sequences"] = board.ledger.replayed_sequences
        for name in sorted(board.waiting):
            board.let_in(name)
        board.refresh_basis()
        packet = Packet(
            number=version,
            fragment=0,
            base_version=base_version,
            tensors=tensors,
            digest=store.digest,
            basis=board.basis,
            phase=board.phase,
            evaluate=self._judge_of(version),
        )
        board.packets["version"].append(packet)
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
        self, version: int, phase: str, losses: dict[str, float], tokens: int, size: float, merge_s: float
    ) -> None:
        fields = {"phase": phase, "islands": sorted(losses), "tokens": tokens, "merge_s": round(merge_s, 4)}
        fields |= {"losses": {name: round(loss, 6) for name, loss in losses.items()}}
        self._recorder.emit("outer_step", {**self._standing(version), **fields, "delta_norm": round(size, 6)})

    def show_standing(self) -> None:
        """Where a continued run stands, for views that begin with this attempt; it is no new fact."""
        fields = {"phase": self._board.phase, "islands": [], "losses": {}, "tokens": 0}
        fields |= {"delta_norm": 0.0, "merge_s": 0.0}
        self._recorder.show("outer_step", {**self._standing(self._store.version), **fields})

    def _standing(self, version: int) -> dict[str, Any]:
        store = self._store
        return {
            "version": version,
            "fragment": 0,
            "digest": store.digest,
            "committed_sequences": len(store.committed),
            "total_sequences": self._board.setup.total_sequences,
            "committed_tokens": int(store.counters["committed_tokens"]),
            "bytes_up": int(store.counters["bytes_up"]),
            "bytes_down": int(store.counters["bytes_down"]),
        }


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
