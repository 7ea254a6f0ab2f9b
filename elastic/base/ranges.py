"""Sets of integers kept as ranges: the ledger's arithmetic.

A run may have a billion data positions; they are leased and committed in long runs, so a set of
them is a short list of half-open ranges `[start, stop)`. All sets are values: an operation returns
a new one. Everything that scales with the number of ranges is slicing in C.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

Pair = tuple[int, int]


class RangeSet:
    """An immutable set of integers as sorted, disjoint, never touching half-open ranges.

    `len()` counts integers; iteration yields `(start, stop)` pairs. Use `pairs` rather than
    `list(ranges)`, which would reserve memory for `len()` entries.
    """

    __slots__ = ("_count", "_starts", "_stops")

    _starts: tuple[int, ...]
    _stops: tuple[int, ...]
    _count: int

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        """Take pairs in any order; they may overlap and may be empty.

        Raises ValueError if a range ends before it starts.
        """
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in sorted((a, b) for a, b in ranges):
            if start > stop:
                raise ValueError(f"range ({start}, {stop}) ends before it starts")
            if start == stop:
                continue
            if stops and start <= stops[-1]:
                stops[-1] = max(stops[-1], stop)
            else:
                starts.append(start)
                stops.append(stop)
        self._starts, self._stops = tuple(starts), tuple(stops)
        self._count = sum(stops) - sum(starts)

    @classmethod
    def _of(cls, starts: list[int], stops: list[int], count: int) -> RangeSet:
        """Build from bounds that are sorted and disjoint already, and hold `count` integers."""
        result = cls.__new__(cls)
        result._starts, result._stops, result._count = tuple(starts), tuple(stops), count
        return result

    # ------------------------------------------------------------------------------ reading

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The ranges as `(start, stop)` pairs, sorted."""
        return tuple(zip(self._starts, self._stops, strict=True))

    def __iter__(self) -> Iterator[Pair]:
        return zip(self._starts, self._stops, strict=True)

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    def __hash__(self) -> int:
        return hash((self._starts, self._stops))

    def __repr__(self) -> str:
        return f"RangeSet({[*self.pairs]})"

    def __contains__(self, position: int) -> bool:
        return self.contains(position, position + 1)

    def contains(self, start: int, stop: int) -> bool:
        """Whether every integer of `[start, stop)` is in the set."""
        if start >= stop:
            return True
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and stop <= self._stops[index]

    def __le__(self, other: RangeSet) -> bool:
        return all(other.contains(start, stop) for start, stop in self)

    def isdisjoint(self, other: RangeSet) -> bool:
        """Whether no integer is in both sets."""
        return not self & other

    def at_or_after(self, position: int) -> Pair | None:
        """The first stretch of the set at or after `position`, cut to begin no earlier."""
        index = bisect_right(self._stops, position)
        if index == len(self._stops):
            return None
        return max(self._starts[index], position), self._stops[index]

    def first(self, count: int) -> RangeSet:
        """The `count` smallest integers, or all if there are fewer."""
        kept: list[Pair] = []
        for start, stop in self:
            if count <= 0:
                break
            kept.append((start, min(stop, start + count)))
            count -= stop - start
        return RangeSet(kept)

    # --------------------------------------------------------------------------- operations

    def __or__(self, other: RangeSet) -> RangeSet:
        large, small = (self, other) if len(self._starts) >= len(other._starts) else (other, self)
        if not small:
            return large
        if 8 * len(small._starts) > len(large._starts):
            return RangeSet((*large.pairs, *small.pairs))
        starts, stops, count = list(large._starts), list(large._stops), large._count
        for start, stop in small:
            i = bisect_left(stops, start)  # first range that overlaps or touches
            j = bisect_right(starts, stop)  # first range wholly behind
            if i < j:
                start, stop = min(start, starts[i]), max(stop, stops[j - 1])
            count += (stop - start) - (sum(stops[i:j]) - sum(starts[i:j]))
            starts[i:j], stops[i:j] = [start], [stop]
        return RangeSet._of(starts, stops, count)

    def __and__(self, other: RangeSet) -> RangeSet:
        large, small = (self, other) if len(self._starts) >= len(other._starts) else (other, self)
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in small:
            for i in range(bisect_right(large._stops, start), bisect_left(large._starts, stop)):
                starts.append(max(start, large._starts[i]))
                stops.append(min(stop, large._stops[i]))
        return RangeSet._of(starts, stops, sum(stops) - sum(starts))

    def __sub__(self, other: RangeSet) -> RangeSet:
        if len(other._starts) > len(self._starts):
            other = self & other  # only what touches this set matters
        starts, stops, count = list(self._starts), list(self._stops), self._count
        for start, stop in other:
            i = bisect_right(stops, start)  # first range that overlaps
            j = bisect_left(starts, stop)  # first range wholly behind
            if i >= j:
                continue
            first, last = starts[i], stops[j - 1]
            left, right = max(start - first, 0), max(last - stop, 0)  # what stays on either side
            count += left + right - (sum(stops[i:j]) - sum(starts[i:j]))
            starts[i:j] = [first] * bool(left) + [stop] * bool(right)
            stops[i:j] = [start] * bool(left) + [last] * bool(right)
        return RangeSet._of(starts, stops, count)

    # --------------------------------------------------------------------------------- JSON

    def to_json(self) -> list[list[int]]:
        """`[[start, stop], ...]`, as records hold it."""
        return [[start, stop] for start, stop in self]

    @classmethod
    def from_json(cls, value: object) -> RangeSet:
        """Read `to_json`'s form back. Raises ValueError on anything else."""
        if not isinstance(value, list | tuple):
            raise ValueError(f"ranges must be a list of [start, stop], not {value!r}")
        for pair in value:
            numbers = isinstance(pair, list | tuple) and len(pair) == 2
            if not numbers or any(type(bound) is not int for bound in pair):
                raise ValueError(f"a range must be [start, stop], two integers, not {pair!r}")
        return cls(value)


EMPTY = RangeSet()
"""The empty set."""
