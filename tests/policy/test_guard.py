"""Lengths that cannot be true, and islands that hand them in again and again."""

from __future__ import annotations

import json
import math

import pytest

from elastic.policy.guard import NEEDED, Guard

pytestmark = pytest.mark.unit


def _fed(lengths: list[float], **settings: float) -> Guard:
    guard = Guard(**settings)  # type: ignore[arg-type]
    for length in lengths:
        assert guard.judge(0, length) == ""
        guard.accepted("a", 0, length)
    return guard


def test_a_length_far_beyond_the_usual_is_named():
    """The median of 1, 2, 3, 4 is 2.5; with limit 10 anything above 25 is refused."""
    guard = _fed([1.0, 2.0, 3.0, 4.0], limit=10.0)
    assert guard.judge(0, 25.0) == ""
    assert guard.judge(0, 50.0) == "its length 50 is 20 times the usual 2.5; outer.norm_limit is 10"
    assert guard.judge(1, 50.0) == ""  # another fragment, of which nothing is known


def test_nothing_is_judged_before_enough_is_known():
    """The first few lengths may be anything."""
    guard = _fed([1.0] * (NEEDED - 1))
    assert guard.judge(0, 1e9) == ""


def test_a_slow_change_is_no_explosion():
    """Lengths that grow by half from one to the next, as in a warm-up, pass for ever."""
    _fed([1.5**number for number in range(60)], limit=10000.0)


def test_contributions_without_progress_do_not_lower_the_usual():
    """An island that joins hands in zeros."""
    guard = _fed([1.0] * NEEDED + [0.0] * 40, limit=10.0)
    assert guard.judge(0, 5.0) == ""


def test_only_refusals_in_a_row_lead_to_quarantine():
    """Two, one that is accepted, then three."""
    guard = Guard()
    for _ in range(2):
        guard.refused("b")
    guard.accepted("b", 0, 1.0)
    for _ in range(2):
        guard.refused("b")
    assert not guard.is_quarantined("b")
    guard.refused("b")
    assert guard.is_quarantined("b")
    assert not guard.is_quarantined("a")


@pytest.mark.parametrize("length", [math.nan, math.inf])
def test_a_length_that_is_no_number_is_refused_at_once(length):
    """Also while nothing is known yet: it would be the usual length from then on."""
    assert Guard().judge(0, length) == f"its length is {length}"


def test_the_first_steps_of_a_warm_up_are_no_explosion():
    """Four islands, a rate that rises from 1 to 500 parts in 500 rounds: the median is 4 rounds old."""
    _fed([float(number) for number in range(1, 501) for _ in range(4)], limit=3.0)


def test_one_explosion_does_not_change_what_is_usual():
    """Only accepted lengths count, and a median does not follow one that slipped through."""
    guard = _fed([1.0] * NEEDED + [9.0], limit=10.0)
    assert guard.judge(0, 10.0) == ""
    assert guard.judge(0, 10.1) != ""


def test_a_released_island_has_as_many_tries_as_before():
    """Three refusals, release, two more: not quarantined; all five are counted."""
    guard = Guard()
    for _ in range(3):
        guard.refused("b")
    guard.release("b")
    for _ in range(2):
        guard.refused("b")
    assert not guard.is_quarantined("b")
    assert guard.refusals == {"b": 5}


def test_a_restored_guard_judges_as_before():
    """Through JSON: the usual lengths, the refusals in a row and those in all."""
    before = _fed([1.0, 2.0, 3.0, 4.0], limit=10.0)
    for _ in range(3):
        before.refused("b")
    after = Guard(limit=10.0)
    after.restore(json.loads(json.dumps(before.to_json())))
    assert after.judge(0, 50.0) == before.judge(0, 50.0) != ""
    assert after.is_quarantined("b")
    assert after.refusals == {"b": 3}
    assert after.to_json() == before.to_json()
