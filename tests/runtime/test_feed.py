"""What an island has in hand: batches of a lease, and what belongs to the next contribution."""

from __future__ import annotations

import pytest

from elastic.base.ranges import RangeSet
from elastic.runtime.feed import Feed

pytestmark = pytest.mark.unit


def test_a_lease_is_cut_into_batches() -> None:
    """Batches follow each other without a gap; the last of a lease may be short."""
    feed = Feed(4)
    assert feed.next_batch() is None
    assert feed.grant(16, 26) == (16, 20)
    seen = []
    while (batch := feed.next_batch()) is not None:
        seen.append(batch)
        feed.trained(*batch)
    assert seen == [(16, 20), (20, 24), (24, 26)]
    assert (feed.held, feed.rest) == ([RangeSet([(16, 26)])], RangeSet())


def test_a_batch_never_spans_a_gap() -> None:
    """Two separate stretches of returned data give separate batches."""
    feed = Feed(4)
    feed.grant(0, 2)
    feed.rest = feed.rest | RangeSet([(10, 13)])
    seen = []
    while (batch := feed.next_batch()) is not None:
        seen.append(batch)
        feed.trained(*batch)
    assert seen == [(0, 2), (10, 13)]


def test_a_batch_that_was_not_trained_stays() -> None:
    """Asking for the next batch takes nothing away: a step that was broken off is taken again."""
    feed = Feed(4)
    feed.grant(0, 8)
    assert feed.next_batch() == feed.next_batch() == (0, 4)


def test_handing_in_takes_what_was_trained_only() -> None:
    """A contribution holds the trained positions; the rest of the lease stays in hand."""
    feed = Feed(4)
    feed.grant(0, 16)
    feed.trained(0, 4)
    feed.trained(4, 8)
    assert feed.hand_in(0) == RangeSet([(0, 8)])
    assert feed.hand_in(0) == RangeSet()
    assert feed.rest == RangeSet([(8, 16)])


def test_clear_forgets_both() -> None:
    """After a re-base nothing is in hand."""
    feed = Feed(4)
    feed.grant(0, 8)
    feed.trained(0, 4)
    feed.clear()
    assert feed.held == [RangeSet()]
    assert not feed.rest
