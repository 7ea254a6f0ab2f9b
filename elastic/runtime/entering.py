"""How an island takes part: join, be admitted, hold the current global parameters."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from elastic.base.errors import DeadlineError
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Entry, Hello, Member
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.island_store import Saved
from elastic.runtime.outer_phase import OuterPhase
from elastic.runtime.synchronous_phase import SynchronousPhase

POLL_S = 1.0


def parameter_fingerprint(
    shapes: Mapping[str, Sequence[int]], fragments: Iterable[Sequence[str]] = ()
) -> str:
    """Hash of names, full shapes and the fragments they belong to; equal on all islands of a run."""
    text = ";".join(f"{name}:{tuple(shape)}" for name, shape in sorted(shapes.items()))
    parts = [",".join(sorted(names)) for names in fragments]
    if len(parts) > 1:
        text += "|" + "|".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def enter(rank: IslandRank) -> bool:
    """Join if that has not happened, and take over the current global parameters.

    Returns False when the run is stopping before the island was admitted.
    """
    rank.abandon()  # it belongs to what the island held before
    saved = rank.saved
    hello = Hello(
        island=rank.name,
        workers=rank.group.world_size,
        device=rank.device,
        versions=dict(rank.versions),
        parameters=parameter_fingerprint(rank.inner.shapes, rank.fragments),
        step=saved.step if saved else rank.step,
        bases=tuple(saved.progress.versions) if saved else (),
        pending=saved.progress.pending if saved else (),
        sent=saved.progress.sent if saved else {},
        rest=saved.rest if saved else RangeSet(),
    )
    if rank.member is None:
        generation = rank.agree(lambda: rank.link.join(hello))
        rank.member = Member(rank.name, generation, rank.group.rank, rank.group.world_size)
    entries: list[Entry] = []

    def admitted() -> bool:
        while not rank.heart.stop_asked:
            entry = rank.link.enter(rank.me, hello, POLL_S)
            if entry is not None:
                entries.append(entry)
                return True
        return False

    if not rank.agree(admitted):
        return False
    entry = rank.everyone(lambda: entries[0] if entries else _entry_of_admitted(rank, hello))
    _take_over(rank, entry, saved)
    rank.saved = None
    return True


def _entry_of_admitted(rank: IslandRank, hello: Hello) -> Entry:
    """The entry for a rank other than 0: its island was admitted a moment ago."""
    entry = rank.link.enter(rank.me, hello, rank.job.outer.sync_timeout_s)
    if entry is None:
        raise DeadlineError(f"rank {rank.group.rank} of island {rank.name} was not let in after rank 0 was")
    return entry


def _take_over(rank: IslandRank, entry: Entry, saved: Saved | None) -> None:
    """Hold the published parameters as base, and they or the own checkpoint as local values."""
    base = rank.own_rows(entry.tensors)
    digest = rank.digest_of(base)
    if digest != entry.digest:
        raise RuntimeError(
            f"island {rank.name} received versions {list(entry.versions)} with digest {digest}, "
            f"the synchronizer published {entry.digest}: the transfer is damaged"
        )
    resumed = saved if entry.claimed else None
    with torch.no_grad():
        for name, local in rank.local().items():
            local.copy_(resumed.parameters[name] if resumed else base[name])
    _take_over_moments(rank, entry, saved)
    rank.basis = entry.basis
    rank.step = saved.step if saved else rank.step
    rank.feed.clear()
    rank.feed.rest = entry.leased
    if entry.phase == "synchronous":
        rank.phase = SynchronousPhase(rank, min(entry.versions), entry.gradient_step)
    elif resumed:
        progress = resumed.progress
        rank.feed.held = [ranges - progress.missed for ranges in progress.held]
        if progress.basis is not None:  # until the next version: what has been counted stays as it was
            counted = progress.basis.committed_tokens
            rank.basis = dataclasses.replace(entry.basis, committed_tokens=counted)
        rank.phase = OuterPhase.resume(rank, entry, base, resumed)
    else:
        rank.phase = OuterPhase.begin(rank, base, entry.versions, entry.last_fragment)
    rank.emit(
        "island_joined",
        {
            "workers": rank.group.world_size,
            "device": rank.device,
            "version": min(entry.versions),
            "digest": digest,
            "resumed_step": rank.step,
        },
    )


def _take_over_moments(rank: IslandRank, entry: Entry, saved: Saved | None) -> None:
    """AdamW's moments: in the synchronous phase the run's, which are zeros before the first anchor.

    In the outer phase the own checkpoint's; without one they stay as they are: zeros in a new process,
    the island's own after a re-base.
    """
    if entry.phase == "synchronous":
        rank.inner.load_moments(_moments_of(rank, entry), entry.adam_steps)
    elif saved is not None:
        rank.inner.load_moments(saved.moments, saved.adam_steps)


def _moments_of(rank: IslandRank, entry: Entry) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of the run's moments."""
    if entry.moments is None:
        return {name: (torch.zeros_like(rows), torch.zeros_like(rows)) for name, rows in rank.local().items()}
    first, second = (rank.own_rows(entry.moments, f"{moment}/") for moment in ("exp_avg", "exp_avg_sq"))
    return {name: (first[name], second[name]) for name in rank.parameters}
