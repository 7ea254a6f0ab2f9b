"""What an island has in hand: leased positions not yet trained, and trained ones not yet merged."""

from __future__ import annotations

from elastic.base.ranges import RangeSet


class Feed:
    """Cuts leased ranges into batches and remembers what was trained.

    `held` are, by fragment, positions trained since its last contribution; they belong to the next one.
    `rest` are leased positions still to be trained.
    """

    def __init__(self, batch_sequences: int, fragments: int = 1) -> None:
        self.batch_sequences = batch_sequences
        self.held = [RangeSet()] * fragments
        self.rest = RangeSet()

    def grant(self, start: int, stop: int) -> tuple[int, int]:
        """Take a lease; returns its first batch."""
        self.rest = self.rest | RangeSet([(start, stop)])
        return start, min(stop, start + self.batch_sequences)

    def next_batch(self) -> tuple[int, int] | None:
        """The next batch as positions start..stop, or None when nothing is leased.

        A batch never spans a gap, so the last one of a lease may be short.
        """
        for start, stop in self.rest:
            return start, min(stop, start + self.batch_sequences)
        return None

    def trained(self, start: int, stop: int) -> None:
        """Positions start..stop went through an inner step."""
        batch = RangeSet([(start, stop)])
        self.rest = self.rest - batch
        self.held = [ranges | batch for ranges in self.held]

    def hand_in(self, fragment: int) -> RangeSet:
        """The positions of the fragment's next contribution; it holds them no longer."""
        ranges, self.held[fragment] = self.held[fragment], RangeSet()
        return ranges

    def let_go(self) -> None:
        """Everything trained was handed in, in all fragments."""
        self.held = [RangeSet()] * len(self.held)

    def clear(self) -> None:
        """Forget everything: the leases were returned."""
        self.let_go()
        self.rest = RangeSet()
