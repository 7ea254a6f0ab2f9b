"""RangeSet behaves like a set of integers, whatever the shape of its ranges."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.ranges import EMPTY, RangeSet

pytestmark = pytest.mark.unit

pairs = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda at: (at[0], at[0] + at[1]))
few = st.lists(pairs, max_size=3)
many = st.lists(st.tuples(st.integers(0, 300), st.just(1)).map(lambda at: (at[0], at[0] + 1)), max_size=60)
lists = few | many


def integers(ranges: RangeSet) -> set[int]:
    """Its integers, one by one."""
    return {position for start, stop in ranges for position in range(start, stop)}


def as_set(listed: list[tuple[int, int]]) -> set[int]:
    """The integers of plain pairs."""
    return {position for start, stop in listed for position in range(start, stop)}


@settings(deadline=None)
@given(lists, lists)
def test_operations_agree_with_sets(left, right):
    """Union, difference, intersection and comparisons are those of the sets of integers."""
    a, b = RangeSet(left), RangeSet(right)
    x, y = as_set(left), as_set(right)
    assert integers(a) == x
    assert len(a) == len(x)
    assert integers(a | b) == x | y
    assert integers(a - b) == x - y
    assert integers(a & b) == x & y
    assert (a <= b) == (x <= y)
    assert a.isdisjoint(b) == x.isdisjoint(y)
    assert (a == b) == (x == y)


@settings(deadline=None)
@given(lists, lists)
def test_results_are_canonical(left, right):
    """Equal sets have equal ranges: sorted, not empty, never touching, with a right count."""
    a, b = RangeSet(left), RangeSet(right)
    for result in (a, a | b, a - b, a & b):
        assert result == RangeSet(result.pairs)
        assert len(result) == len(integers(result))
        assert all(stop < start for (_, stop), (start, _) in pairwise(result.pairs))
        assert hash(result) == hash(RangeSet(reversed(result.pairs)))


@settings(deadline=None)
@given(lists, st.integers(0, 80), st.integers(0, 12))
def test_looking_things_up(listed, start, length):
    """`contains`, `in`, `first` and `at_or_after` say what the set of integers says."""
    ranges, numbers = RangeSet(listed), as_set(listed)
    assert ranges.contains(start, start + length) == (set(range(start, start + length)) <= numbers)
    assert (start in ranges) == (start in numbers)
    assert integers(ranges.first(length)) == set(sorted(numbers)[:length])
    later = [position for position in numbers if position >= start]
    stretch = ranges.at_or_after(start)
    assert (stretch[0] if stretch else None) == (min(later) if later else None)
    if stretch:
        assert ranges.contains(*stretch)
        assert stretch[1] not in numbers


@settings(deadline=None)
@given(lists)
def test_json_round_trip(listed):
    """A set survives JSON and pickle."""
    ranges = RangeSet(listed)
    assert RangeSet.from_json(json.loads(json.dumps(ranges.to_json()))) == ranges
    assert pickle.loads(pickle.dumps(ranges)) == ranges


@pytest.mark.parametrize(
    "value", [{"a": 1}, [[1]], [[1, 2, 3]], [["1", "2"]], [[1, 2.0]], [[True, 2]], [3], "ab"]
)
def test_json_of_another_form_is_refused(value):
    """A damaged record raises ValueError, with what was seen."""
    with pytest.raises(ValueError, match="must be"):
        RangeSet.from_json(value)


def test_a_range_that_ends_before_it_starts_is_refused():
    """Bounds in the wrong order are a bug, not an empty range."""
    with pytest.raises(ValueError, match=r"\(4, 2\) ends before"):
        RangeSet([(4, 2)])


def test_a_billion_integers_are_one_pair():
    """Size in memory and time depends on the ranges, not on the integers."""
    ranges = RangeSet([(0, 10**9)]) - RangeSet([(5, 6)])
    assert len(ranges) == 10**9 - 1
    assert ranges.pairs == ((0, 5), (6, 10**9))
    assert repr(ranges) == "RangeSet([(0, 5), (6, 1000000000)])"
    assert not EMPTY
    assert ranges
