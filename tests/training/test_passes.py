"""Passes: every sequence once, all ranks equally often."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.passes import num_targets, passes, shares

pytestmark = pytest.mark.unit


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 9))
def test_every_sequence_counts_once_and_passes_match(size: int, world_size: int, micro: int) -> None:
    """Shares cover the batch and differ by at most one; all ranks run equally many passes."""
    cuts = shares(size, world_size)
    assert [row for start, stop in cuts for row in range(start, stop)] == list(range(size))
    assert max(b - a for a, b in cuts) - min(b - a for a, b in cuts) <= 1
    by_rank = [passes(size, world_size, rank, micro) for rank in range(world_size)]
    assert len({len(rank) for rank in by_rank}) == 1
    counted = [row for rank in by_rank for one in rank if one.counts for row in range(one.start, one.stop)]
    assert counted == list(range(size))
    assert all(0 < one.stop - one.start <= micro for rank in by_rank for one in rank)


def test_padding_does_not_count() -> None:
    """Only targets (all but the first token) of 0 and more are counted."""
    assert num_targets(np.array([[5, 0, 7, -1], [1, -1, -1, -1]])) == 2
    assert num_targets(np.zeros((0, 4))) == 0
