from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.training.order import Order, permute

pytestmark = pytest.mark.unit

GOLDEN_10 = [9, 6, 5, 8, 0, 2, 1, 7, 3, 4, 9, 0, 5, 6, 8, 7, 3, 2, 4, 1]
GOLDEN_LARGE = [605553083972, 191313950673, 339356010891, 298275469171]


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
def test_every_epoch_holds_each_sequence_once(n, seed, epoch):
    """For every number of sequences, seed and epoch the order is a permutation of 0..n-1."""
    ids = permute(np.arange(n, dtype=np.uint64), n, seed, epoch)
    assert ids.dtype == np.int64
    assert np.array_equal(np.sort(ids), np.arange(n))


@given(n=st.integers(1, 50), cuts=st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_any_cutting_gives_the_same_order(n, cuts):
    """Reading positions in pieces, across epochs, gives what reading them at once gives."""
    order = Order(n, seed=3)
    cuts = sorted(cuts)
    pieces = [order.sequences(a, b) for a, b in pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), order.sequences(cuts[0], cuts[-1]))


def test_epochs_and_seeds_differ():
    """Another epoch and another seed are other permutations, the same pair is the same one."""
    n = 1000
    first = Order(n, seed=1).sequences(0, n)
    assert np.array_equal(first, Order(n, seed=1).sequences(0, n))
    for other in (Order(n, seed=1).sequences(n, 2 * n), Order(n, seed=2).sequences(0, n)):
        assert np.mean(first == other) < 0.01


def test_golden_order():
    """The order is the same on every platform and in every version: it is part of a run's state."""
    assert Order(10, seed=0).sequences(0, 20).tolist() == GOLDEN_10
    assert Order(10**12, seed=7).sequences(10**12 - 2, 10**12 + 2).tolist() == GOLDEN_LARGE


def test_neighbours_are_spread():
    """Neighbouring positions are unrelated sequences: steps are large and positions uncorrelated."""
    n = 20_000
    ids = Order(n, seed=5).sequences(0, n).astype(float)
    assert abs(np.corrcoef(np.arange(n), ids)[0, 1]) < 0.03
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.03
    assert abs(np.mean(np.abs(np.diff(ids))) / n - 1 / 3) < 0.01
    buckets = np.bincount((ids[: n // 10] // (n / 10)).astype(int), minlength=10)
    assert buckets.min() > 0.8 * n / 100
    assert buckets.max() < 1.2 * n / 100


def test_huge_corpora_need_no_memory():
    """A corpus of 10^15 sequences is ordered as quickly as a small one, without repeats."""
    ids = Order(10**15, seed=0).sequences(10**14, 10**14 + 1000)
    assert len(set(ids.tolist())) == 1000
    assert ids.min() >= 0
    assert ids.max() < 10**15


def test_impossible_requests_are_refused():
    """Empty corpora and reversed ranges are errors that show the numbers."""
    with pytest.raises(ValueError, match="got 0"):
        Order(0, seed=0)
    with pytest.raises(ValueError, match="got 5 and 4"):
        Order(10, seed=0).sequences(5, 4)
    assert Order(10, seed=0).sequences(4, 4).size == 0
