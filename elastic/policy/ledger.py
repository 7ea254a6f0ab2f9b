"""Who trains which data: leases, commits and returns of positions.

A position is a place in the budget's order, `0 .. total - 1` (several epochs are one long order).
Every position is at any time exactly one of *committed* (merged into every fragment of the outer
parameters), *leased* (to one generation of one island) or *free*. A free position is either in a
block nobody has touched yet or *returned*, which go out first. The ledger holds ranges, never
single positions, and knows no clock and no storage: after a restart it is built again from the
committed ranges of the records.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.base.errors import ElasticError
from elastic.base.ranges import EMPTY, RangeSet

Holder = tuple[str, int]
"""(island, generation)"""


class LedgerError(ElasticError):
    """The ledger was asked for something that would break exactly-once.

    Example: a merge of positions 128..256 by an island to which they are not leased.
    """


class Ledger:
    """Leases the positions `0 .. total - 1` in blocks of `block`.

    `fragments` is the number of separately merged fragments of the parameters: a position is
    committed once it is merged in each of them. `committed` is what earlier lives committed.
    """

    def __init__(self, total: int, block: int, fragments: int = 1, committed: RangeSet = EMPTY) -> None:
        if total < 1 or block < 1 or fragments < 1:
            raise LedgerError(
                "total, block and fragments of a ledger must be at least 1",
                saw=f"total {total}, block {block}, fragments {fragments}",
            )
        if not committed <= RangeSet([(0, total)]):
            raise LedgerError(
                "positions are committed that this budget does not have",
                saw=f"committed {committed.pairs[-1]}, total {total}",
                fix="give a budget at least as large as what is committed",
            )
        self.total, self.block, self.fragments = total, block, fragments
        self.replayed_sequences = 0
        """Positions given back after at least one fragment had merged them."""
        self._committed = committed
        self._leased: dict[Holder, RangeSet] = {}
        self._merged: dict[Holder, list[RangeSet]] = {}
        touched = self._blocks_of(committed)
        self._untouched = RangeSet([(0, -(-total // block))]) - touched  # of block numbers
        self._returned = self._positions_of(touched) - committed
        self._dealt_to: list[str] = []
        self._residues: dict[str, int] = {}
        self._cursors: dict[int, int] = {}

    # ------------------------------------------------------------------------------ reading

    @property
    def committed(self) -> RangeSet:
        """Positions merged in every fragment."""
        return self._committed

    @property
    def committed_count(self) -> int:
        """How many positions are committed."""
        return len(self._committed)

    @property
    def returned(self) -> RangeSet:
        """Free positions that are given out first, to whoever asks first."""
        return self._returned

    @property
    def free(self) -> RangeSet:
        """Positions nobody holds."""
        return self._positions_of(self._untouched) | self._returned

    @property
    def leased(self) -> dict[Holder, RangeSet]:
        """What each generation of each island holds, uncommitted."""
        return dict(self._leased)

    def held(self, island: str, generation: int) -> RangeSet:
        """What this generation holds, uncommitted."""
        return self._leased.get((island, generation), EMPTY)

    @property
    def done(self) -> bool:
        """Whether every position is committed."""
        return len(self._committed) == self.total

    # ------------------------------------------------------------------------------ changing

    def lease(self, island: str, generation: int, live: Sequence[str]) -> tuple[int, int] | None:
        """Give the island its next positions `[start, stop)`, at most one block; None: nothing for it.

        Returned positions go first, to whoever asks. Otherwise block k belongs to the island whose
        index among the sorted `live` is `k mod M`; an island whose own blocks are used up gets None
        even while others have some left, so that who trains what does not depend on speed. `live`
        should hold idle islands too (`Membership.members`): an idle island has no blocks left, and
        dealing anew when it falls idle would make the deal depend on the moment. When an island is
        lost or joins, all untouched blocks are dealt anew.
        """
        self._deal(live)
        if island not in self._residues:
            raise LedgerError(f"island {island} asks for data but is not among {sorted(live)}")
        if self._returned:
            start, stop = self._returned.pairs[0]
            stop = min(stop, start + self.block)
            self._returned -= RangeSet([(start, stop)])
        else:
            number = self._next_block(self._residues[island])
            if number is None:
                return None
            self._untouched -= RangeSet([(number, number + 1)])
            start, stop = number * self.block, min((number + 1) * self.block, self.total)
        self._grant(island, generation, RangeSet([(start, stop)]))
        return start, stop

    def has_for(self, island: str, live: Sequence[str]) -> bool:
        """Whether `lease` would give this island something now; nothing changes."""
        self._deal(live)
        if island not in self._residues:
            return False
        return bool(self._returned) or self._next_block(self._residues[island]) is not None

    def claim(
        self, island: str, generation: int, ranges: RangeSet, pending: Sequence[RangeSet] | None = None
    ) -> bool:
        """Lease exactly these positions, which a restarted island has trained but not seen committed.

        `pending`: by fragment, those it still has to hand in; the others of `ranges` count as merged
        there. Without it nothing is merged. All of them free: they are leased and the answer is True.
        Otherwise nothing changes and the answer is False. What is left of a block that is claimed in
        part counts as returned.
        """
        taken = [self._committed, *self._leased.values()]
        inside = ranges <= RangeSet([(0, self.total)])
        if not inside or any(not ranges.isdisjoint(held) for held in taken):
            return False
        touched = self._blocks_of(ranges) & self._untouched
        self._untouched -= touched
        self._returned = (self._returned | self._positions_of(touched)) - ranges
        if ranges:
            self._grant(island, generation, ranges)
            merged = self._merged[island, generation]
            for fragment, left in enumerate(pending or ()):
                merged[fragment] |= ranges - left
        return True

    def release(self, island: str, generation: int | None = None, keep: RangeSet = EMPTY) -> RangeSet:
        """Put what the island holds back to the front of the queue, and say what that was.

        Without `generation`: what any generation of it holds. `keep` stays leased: what a lost
        island has handed in completely and the open round will merge (`Rounds.pending_ranges`).
        Merges into some but not all fragments are forgotten and counted in `replayed_sequences`.
        """
        freed = EMPTY
        for holder in [*self._leased]:
            if holder[0] != island or generation not in (None, holder[1]):
                continue
            back = self._leased[holder] - keep
            ahead = RangeSet(pair for merged in self._merged[holder] for pair in (merged & back))
            self.replayed_sequences += len(ahead)
            self._take_from(holder, back)
            freed |= back
        self._returned |= freed
        return freed

    def merge(self, island: str, generation: int, fragment: int, ranges: RangeSet) -> RangeSet:
        """Note that `fragment` merged these positions; returns those that are committed by it.

        Raises LedgerError if they are not leased to this generation, or merged there already.
        """
        holder = (island, generation)
        if not ranges:
            return EMPTY
        if not ranges <= self.held(island, generation):
            raise LedgerError(
                f"island {island}, generation {generation} hands in positions it does not hold",
                saw=f"{(ranges - self.held(island, generation)).to_json()}",
            )
        merged = self._merged[holder]
        if not ranges.isdisjoint(merged[fragment]):
            raise LedgerError(
                f"fragment {fragment} has merged positions of island {island} before",
                saw=f"{(ranges & merged[fragment]).to_json()}",
            )
        merged[fragment] |= ranges
        complete = ranges
        for other in merged:
            complete &= other
        self._take_from(holder, complete)
        self._committed |= complete
        return complete

    def check(self) -> None:
        """Raise LedgerError unless every position is exactly one of committed, leased and free."""
        parts = [
            self._committed,
            self._returned,
            self._positions_of(self._untouched),
            *self._leased.values(),
        ]
        together = RangeSet(pair for part in parts for pair in part)
        counted = sum(len(part) for part in parts)
        if together != RangeSet([(0, self.total)]) or counted != self.total:
            raise LedgerError(
                "a position is lost or held twice",
                saw=f"{counted} positions held, {len(together)} different ones, {self.total} in all",
            )
        for holder, fragments in self._merged.items():
            if any(not merged <= self._leased[holder] for merged in fragments):
                raise LedgerError(f"{holder} has merged positions that it does not hold")

    # ------------------------------------------------------------------------------- inside

    def _deal(self, live: Sequence[str]) -> None:
        """Give every live island its residue class."""
        if live != self._dealt_to:
            self._dealt_to = list(live)
            self._residues = {name: index for index, name in enumerate(sorted(set(live)))}
            self._cursors = {}

    def _next_block(self, residue: int) -> int | None:
        """The smallest untouched block of a residue class."""
        classes = len(self._residues)
        at = self._cursors.get(residue, 0)  # untouched blocks never come back, so it only rises
        while (stretch := self._untouched.at_or_after(at)) is not None:
            number = stretch[0] + (residue - stretch[0]) % classes
            at = self._cursors[residue] = min(number, stretch[1])
            if number < stretch[1]:
                return number
        return None

    def _blocks_of(self, ranges: RangeSet) -> RangeSet:
        """Numbers of the blocks that these positions touch."""
        return RangeSet((start // self.block, -(-stop // self.block)) for start, stop in ranges)

    def _positions_of(self, blocks: RangeSet) -> RangeSet:
        return RangeSet((a * self.block, min(b * self.block, self.total)) for a, b in blocks)

    def _grant(self, island: str, generation: int, ranges: RangeSet) -> None:
        holder = (island, generation)
        self._leased[holder] = self.held(island, generation) | ranges
        self._merged.setdefault(holder, [EMPTY] * self.fragments)

    def _take_from(self, holder: Holder, ranges: RangeSet) -> None:
        left = self._leased[holder] - ranges
        if left:
            self._leased[holder] = left
            self._merged[holder] = [merged - ranges for merged in self._merged[holder]]
        else:
            del self._leased[holder], self._merged[holder]
