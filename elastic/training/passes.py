"""How a batch is spread over the ranks of an island, in micro-batches. No torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pass:
    """Sequences [start, stop) of the batch in one forward pass; a dummy does not count."""

    start: int
    stop: int
    counts: bool = True


def shares(num_sequences: int, world_size: int) -> list[tuple[int, int]]:
    """Split a batch over ranks: contiguous, and no share larger by more than one sequence."""
    small, larger = divmod(num_sequences, world_size)
    return list(itertools.pairwise(rank * small + min(rank, larger) for rank in range(world_size + 1)))


def passes(num_sequences: int, world_size: int, rank: int, micro_batch: int) -> list[Pass]:
    """One rank's share in micro-batches, then dummies up to the number of the longest share's.

    All ranks need the same number, because sharded models talk in every pass.
    """
    cuts = shares(num_sequences, world_size)
    start, stop = cuts[rank]
    mine = [Pass(at, min(at + micro_batch, stop)) for at in range(start, stop, micro_batch)]
    longest = max(len(range(first, last, micro_batch)) for first, last in cuts)
    return mine + [Pass(0, 1, counts=False)] * (longest - len(mine))


def num_targets(sequences: np.ndarray) -> int:
    """Targets that count in sequences [b, T+1]; one below 0 is padding."""
    return int(np.count_nonzero(sequences[:, 1:] >= 0))
