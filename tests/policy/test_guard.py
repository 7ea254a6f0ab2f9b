"""Lengths that cannot be true, and islands that hand them in again and again."""

from __future__ import annotations

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
