"""What an island has in hand: leased positions not yet trained, and trained ones not yet merged."""

from __future__ import annotations

from elastic.base.ranges import RangeSet


class Feed:
    """Cuts leased ranges into batches and remembers what was trained.

    `held` are positions trained since the last adopted version; they belong to the next
    contribution. `rest` are leased positions still to be trained.
    """

    def __init__(self, batch_sequences: int) -> None:
        self._batch = batch_sequences
        self.held = RangeSet()
        self.rest = RangeSet()

    def grant(self, start: int, stop: int) -> tuple[int, int]:
        """Take a lease; returns its first batch."""
        self.rest = self.rest | RangeSet([(start, stop)])
        return start, min(stop, start + self._batch)

    def next_batch(self) -> tuple[int, int] | None:
        """The next batch as positions start..stop, or None when nothing is leased.

        A batch never spans a gap, so the last one of a lease may be short.
        """
        for start, stop in self.rest:
            return start, min(stop, start + self._batch)
        return None

    def trained(self, start: int, stop: int) -> None:
        """Positions start..stop went through an inner step."""
        batch = RangeSet([(start, stop)])
        self.rest, self.held = self.rest - batch, self.held | batch

    def hand_in(self) -> RangeSet:
        """The positions of the next contribution; they are no longer held."""
        ranges, self.held = self.held, RangeSet()
        return ranges

    def clear(self) -> None:
        """Forget everything: the leases were returned."""
        self.held = self.rest = RangeSet()
