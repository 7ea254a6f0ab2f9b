"""The life of one rank of an island: join, receive, lease, step, contribute, adopt, leave.

Read it top to bottom. It knows neither Ray nor the other islands: under Ray
`elastic.runtime.worker` calls `run_island` in every rank; benchmarks and tests call it in threads
over a synchronizer of the same process.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from elastic.base.errors import ElasticError
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Beat, FencedError, Judgement, Work
from elastic.runtime.entering import enter
from elastic.runtime.island_rank import IslandRank, RebaseError, StopAsked
from elastic.runtime.island_store import Saved
from elastic.runtime.phases import OuterPhase, Stepped

IDLE_S = 0.3
MAX_REFUSALS = 3
"""Contributions refused in a row after which an island fails, instead of trying for ever."""
RATE_WINDOW_S = 2.0


def run_island(rank: IslandRank) -> str:
    """Train until the run is done ("done") or somebody asks to stop ("stopped")."""
    rank.saved = rank.store.load() if rank.store else None
    if rank.group.rank == 0:
        rank.heart.start()
    try:
        while True:
            try:
                ending = train(rank) if enter(rank) else "stopped"
            except StopAsked:
                ending = "stopped"
            except RebaseError as refused:
                rank.refusals += 1
                if rank.refusals >= MAX_REFUSALS:
                    raise _refused_for_good(rank, refused) from refused
                rank.events.emit("warning", {"what": f"island {rank.name} re-bases: {refused}"})
                rank.feed.clear()
                continue
            except FencedError as fenced:
                if fenced.superseded:
                    raise
                rank.events.emit("warning", {"what": f"island {rank.name} joins again: {fenced.reason}"})
                rank.feed.clear()
                rank.member = None
                continue
            if ending != "enter":
                leave(rank, ending)
                return ending
    finally:
        rank.heart.end()
        rank.sender.shutdown(wait=False)


def train(rank: IslandRank) -> str:
    """Inner and outer steps from one entry on; returns why it ended: done, stopped, enter."""
    if rank.phase.is_due():  # stopped while it waited for the others
        synchronise(rank)
    while True:
        work = next_work(rank)
        if work.do == "batches":
            take_step(rank, work.start, work.stop)
            if rank.phase.is_due():
                synchronise(rank)
        elif work.do == "flush":
            synchronise(rank)
        elif work.do == "evaluate":
            judge(rank, np.arange(work.start, work.stop), work.start, work.stop, final=True)
        elif work.do == "wait":
            rank.sleep(IDLE_S)
        else:
            return "stopped" if work.do == "stop" else work.do


def next_work(rank: IslandRank) -> Work:
    """What comes next: decided by rank 0, the same on all ranks."""

    def decide() -> dict[str, Any]:
        if rank.stop_asked():
            return asdict(Work("stop"))
        batch = rank.feed.next_batch()
        if batch is None:
            work = rank.link.lease(rank.me, rank.phase.version)
            if work.do != "batches":
                return asdict(work)
            batch = rank.feed.grant(work.start, work.stop)
        return asdict(Work("batches", *batch))

    return Work(**rank.agree(decide))


def take_step(rank: IslandRank, start: int, stop: int) -> None:
    """One inner step on positions start..stop of the order."""
    batch = rank.corpus.train.take(rank.order.sequences(start, stop))
    lr = rank.lr()
    stepped = rank.phase.take_step(batch, (start, stop), lr)
    rank.feed.trained(start, stop)  # after the step: one that was broken off is taken again
    rank.step += 1
    rank.loss_sum += stepped.loss_sum
    rank.tokens += stepped.tokens
    note_progress(rank, stepped, lr)


def synchronise(rank: IslandRank) -> None:
    """Contribute and adopt; judge the new version if asked; save the island when it is time."""
    packet = rank.phase.synchronise()
    rank.loss_sum, rank.tokens, rank.refusals = 0.0, 0, 0
    rank.basis = packet.basis
    warmed_up = packet.phase == "outer" and rank.phase.name != "outer"
    if warmed_up:
        base = {name: rows.clone() for name, rows in rank.local().items()}
        rank.phase = OuterPhase(rank, packet.number, base)
    if packet.evaluate == rank.name:
        total = len(rank.corpus.validation)
        count = min(rank.job.validation.sequences, total)
        # A fixed sample, spread evenly over the held-out sequences.
        judge(rank, np.linspace(0, total - 1, count).round().astype(np.int64), 0, count, final=False)
    # In the synchronous phase the synchronizer's anchors hold all that an island needs.
    if rank.store and (
        warmed_up or (packet.phase == "outer" and packet.number % rank.job.checkpoint.island_every == 0)
    ):
        save(rank)


def judge(rank: IslandRank, ids: np.ndarray, start: int, stop: int, final: bool) -> None:
    """Validation loss of the parameters just adopted on held-out sequences `ids`."""
    loss_sum, tokens = rank.inner.evaluate(rank.corpus.validation.take(ids))
    judgement = Judgement(rank.phase.version, start, stop, loss_sum, tokens, final)
    rank.agree(lambda: rank.link.judged(rank.me, judgement))


def note_progress(rank: IslandRank, stepped: Stepped, lr: float) -> None:
    """Refresh what the next beat says. Rank 0's share of the batch stands for the island's loss."""
    now = rank.clock()
    began, tokens = rank.rate_window
    tokens += stepped.tokens
    rate = rank.beat.tokens_per_s
    if now - began >= RATE_WINDOW_S:
        rate = tokens / (now - began) if began else 0.0
        began, tokens = now, 0
    rank.rate_window = (began, tokens)
    own_tokens = max(1, stepped.own_tokens)
    rank.beat = Beat(
        step=rank.step,
        loss=round(stepped.loss_sum / own_tokens, 6),
        lr=lr,
        grad_norm=round(stepped.grad_norm, 6),
        tokens=rank.beat.tokens + stepped.tokens,
        tokens_per_s=round(rate, 1),
        stall_s=round(rank.stall_s, 3),
        phase=rank.phase.name,
    )


def save(rank: IslandRank) -> str:
    """Write the island's checkpoint: what its next incarnation needs to go on from here."""
    # Leases not yet trained are known to rank 0 only; all ranks write the same description.
    held, rest = rank.group.share(lambda: [rank.feed.held.to_json(), rank.feed.rest.to_json()])
    saved = Saved(
        version=rank.phase.version,
        step=rank.step,
        steps_since=rank.phase.steps_since,
        held=RangeSet.from_json(held),
        rest=RangeSet.from_json(rest),
        loss_sum=rank.loss_sum,
        tokens=rank.tokens,
        adam_steps=rank.inner.steps,
        parameters=rank.local(),
        moments=rank.inner.moments(),
    )
    name = known(rank.store).save(saved, known(rank.member).generation)
    rank.emit("island_checkpoint", {"step": rank.step, "version": rank.phase.version, "name": name})
    return name


def leave(rank: IslandRank, ending: str) -> None:
    """Save what is in hand and say goodbye."""
    name = save(rank) if rank.store and rank.has_entered else ""
    if rank.group.rank == 0 and rank.member is not None:
        rank.link.leave(rank.member, ending, name)


def _refused_for_good(rank: IslandRank, refused: RebaseError) -> ElasticError:
    return ElasticError(
        f"{rank.refusals} contributions of island {rank.name} in a row were refused",
        saw=str(refused),
        fix="look at this island's loss and gradient norm: lower inner.lr if it diverged",
    )
