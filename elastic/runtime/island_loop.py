"""The life of one rank of an island: join, receive, lease, step, contribute, adopt, leave.

Read it top to bottom. It knows neither Ray nor the other islands: under Ray
`elastic.runtime.worker` calls `run_island` in every rank; benchmarks and tests call it in threads
over a synchronizer of the same process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Beat, FencedError, Judgement, Packet, Work
from elastic.runtime.entering import enter
from elastic.runtime.island_rank import IslandRank, RebaseError, StopAsked
from elastic.runtime.island_store import Saved
from elastic.runtime.outer_phase import OuterPhase
from elastic.runtime.phase import Stepped

IDLE_S = 0.3
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
        rank.end()


def train(rank: IslandRank) -> str:
    """Inner and outer steps from one entry on; returns why it ended: done, stopped, enter."""
    if rank.phase.is_due():  # stopped while it waited for the others
        synchronise(rank, rank.phase.synchronise())
    while True:
        work = next_work(rank)
        if work.do == "batches":
            take_step(rank, work.start, work.stop)
            if rank.phase.is_due():
                synchronise(rank, rank.phase.synchronise())
        elif work.do == "flush":
            synchronise(rank, rank.phase.flush())
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
            work = rank.link.lease(rank.me, tuple(rank.phase.versions))
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
    note_progress(rank, stepped, lr)


def synchronise(rank: IslandRank, adoptions: Iterator[Packet]) -> None:
    """Contribute and adopt; judge the new version if asked; save the island when it is time."""
    for packet in adoptions:
        rank.refusals = 0
        rank.basis = packet.basis
        warmed_up = packet.phase == "outer" and rank.phase.name != "outer"
        if warmed_up:
            base = {name: rows.clone() for name, rows in rank.local().items()}
            rank.phase = OuterPhase.begin(rank, base, rank.phase.versions)
        if packet.evaluate == rank.name:
            total = len(rank.corpus.validation)
            count = min(rank.job.validation.sequences, total)
            # A fixed sample, spread evenly over the held-out sequences.
            ids = np.linspace(0, total - 1, count).round().astype(np.int64)
            judge(rank, ids, 0, count, final=False)
        # In the synchronous phase the synchronizer's anchors hold all that an island needs.
        whole = packet.phase == "outer" and packet.fragment == len(rank.fragments) - 1
        if rank.store and (warmed_up or (whole and packet.number % rank.job.checkpoint.island_every == 0)):
            save(rank)


def judge(rank: IslandRank, ids: np.ndarray, start: int, stop: int, final: bool) -> None:
    """Validation loss of the outer parameters on held-out sequences `ids`."""
    with rank.phase.outer_values():
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
        rank.step_s = stepped.tokens / rate if rate else 0.0
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
    rest = rank.group.share(lambda: rank.feed.rest.to_json())
    saved = Saved(
        step=rank.step,
        rest=RangeSet.from_json(rest),
        adam_steps=rank.inner.steps,
        parameters=rank.local(),
        moments=rank.inner.moments(),
        progress=rank.phase.progress(),
        snapshots=rank.phase.snapshots(),
    )
    name = known(rank.store).save(saved, known(rank.member).generation)
    rank.emit("island_checkpoint", {"step": rank.step, "version": rank.phase.version, "name": name})
    return name


def leave(rank: IslandRank, ending: str) -> None:
    """Save what is in hand and say goodbye."""
    name = save(rank) if rank.store and rank.has_entered else ""
    if rank.group.rank == 0 and rank.member is not None:
        rank.link.leave(rank.member, ending, name)
