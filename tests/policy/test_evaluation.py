"""A validation counts every held-out sequence once, whoever computes it."""

from __future__ import annotations

import math
import random

import pytest

from elastic.policy.evaluation import EvaluationQueue

pytestmark = pytest.mark.unit


def test_chunks_cover_the_sequences_once():
    """Chunks are handed out in order, the last one short, and then there is none."""
    queue = EvaluationQueue(version=7, total_sequences=10, chunk=4)
    assert [queue.take("us", 1) for _ in range(4)] == [(0, 4), (4, 8), (8, 10), None]
    assert not queue.finished
    for start, stop in ((4, 8), (0, 4), (8, 10)):
        assert queue.done("us", start, stop, loss_sum=2.0 * (stop - start), tokens=stop - start)
    assert queue.finished
    assert (queue.mean_loss, queue.tokens, queue.done_sequences, queue.version) == (2.0, 10, 10, 7)


def test_the_chunks_of_a_lost_island_go_to_the_others():
    """Unfinished chunks return to the front; a late answer for them does not count."""
    queue = EvaluationQueue(0, 12, 4)
    queue.take("us", 1)
    queue.take("eu", 1)
    queue.done("eu", 4, 8, 4.0, 4)
    queue.release("us")
    queue.release("eu")
    assert queue.take("eu", 1) == (0, 4)
    assert not queue.done("us", 0, 4, 999.0, 4)
    assert queue.done("eu", 0, 4, 4.0, 4)
    assert queue.take("eu", 1) == (8, 12)
    assert queue.take("eu", 1) is None


def test_a_release_of_one_generation_leaves_the_next_alone():
    """A late loss of generation 1 does not take back what generation 2 computes."""
    queue = EvaluationQueue(0, 8, 4)
    queue.take("us", 1)
    queue.take("us", 2)
    queue.release("us", 1)
    assert queue.take("eu", 1) == (0, 4)
    assert queue.done("us", 4, 8, 1.0, 4)


def test_repeated_and_unknown_answers_do_not_count():
    """An answer counts once, and only for the chunk that was given out."""
    queue = EvaluationQueue(0, 8, 4)
    queue.take("us", 1)
    assert not queue.done("us", 0, 3, 1.0, 3)
    assert not queue.done("us", 4, 8, 1.0, 4)
    assert queue.done("us", 0, 4, 1.0, 4)
    assert not queue.done("us", 0, 4, 1.0, 4)
    assert queue.tokens == 4


def test_the_mean_does_not_depend_on_the_order_of_arrival():
    """Any order of the same sums gives the same bits."""
    rng = random.Random(1)
    sums = {start: rng.uniform(1e-3, 1e6) for start in range(0, 400, 4)}
    means = set()
    for _ in range(5):
        queue = EvaluationQueue(0, 400, 4)
        while queue.take("us", 1):
            pass
        for start in rng.sample(sorted(sums), len(sums)):
            queue.done("us", start, start + 4, sums[start], 4)
        means.add(queue.mean_loss)
    assert len(means) == 1


def test_a_number_that_is_not_finite_does_not_hide():
    """One infinite sum makes the mean NaN."""
    queue = EvaluationQueue(0, 8, 4)
    queue.take("us", 1)
    queue.take("us", 1)
    queue.done("us", 0, 4, 1.0, 4)
    queue.done("us", 4, 8, math.inf, 4)
    assert math.isnan(queue.mean_loss)


def test_wrong_use_is_named():
    """No sequences, no chunk and no result yet raise."""
    with pytest.raises(ValueError, match="at least 1"):
        EvaluationQueue(0, 0, 4)
    with pytest.raises(ValueError, match="no token"):
        _ = EvaluationQueue(0, 8, 4).mean_loss
