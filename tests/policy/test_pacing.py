"""Every fragment is snapshotted and adopted once a period, at the step the rule says."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.policy.pacing import Pace, due_step, is_due, sync_every_for

pytestmark = pytest.mark.unit


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    sync_every = draw(st.integers(1, 40))
    return Pace(sync_every, draw(st.integers(1, sync_every)), draw(st.integers(0, sync_every)))


def test_one_fragment_without_overlap_is_classic():
    """Snapshot and adoption both follow every H-th step."""
    pace = Pace(sync_every=5)
    assert [step for step in range(0, 21) if pace.snapshots_at(step)] == [5, 10, 15, 20]
    assert [step for step in range(0, 21) if pace.adoptions_at(step) == (0,)] == [5, 10, 15, 20]
    assert pace.late_snapshots(0) == ()


def test_fragments_are_due_one_after_the_other():
    """Fragment p of P is due at floor((p+1)*H/P); a period of 10 in three is 3, 6, 10."""
    assert [due_step(20, fragment, 3, 10) for fragment in range(3)] == [23, 26, 30]
    pace = Pace(sync_every=10, fragments=3)
    due = {step: pace.adoptions_at(step) for step in range(1, 21) if pace.adoptions_at(step)}
    assert due == {3: (0,), 6: (1,), 10: (2,), 13: (0,), 16: (1,), 20: (2,)}
    assert [pace.position_after(fragment) for fragment in range(3)] == [3, 6, 0]
    assert Pace(sync_every=1).position_after(0) == 0


def test_a_snapshot_lies_overlap_steps_before_its_due_step():
    """It may lie in the period before; one that would lie before the start is taken there."""
    pace = Pace(sync_every=6, fragments=3, overlap_steps=3)  # due at 2, 4, 6
    assert pace.late_snapshots(0) == (0,)
    assert {s: pace.snapshots_at(s) for s in range(0, 10) if pace.snapshots_at(s)} == {
        1: (1,), 3: (2,), 5: (0,), 7: (1,), 9: (2,),
    }  # fmt: skip
    assert {s: pace.adoptions_at(s) for s in range(0, 10) if pace.adoptions_at(s)} == {
        2: (0,), 4: (1,), 6: (2,), 8: (0,),
    }  # fmt: skip


def test_an_island_that_enters_mid_run_is_in_phase():
    """Due at 2, 4, 6. Entering after fragment 1 was adopted: 2 is due after 2 steps, then 0 after 4."""
    pace = Pace(sync_every=6, fragments=3, overlap_steps=4)
    start = pace.position_after(1)
    assert start == 4
    assert pace.late_snapshots(start) == (2, 0)  # due at 6 and 8
    steps = range(start, start + 7)
    assert {s: pace.snapshots_at(s, start) for s in steps if pace.snapshots_at(s, start)} == {
        6: (1,), 8: (2,), 10: (0,),
    }  # fmt: skip
    assert {s: pace.adoptions_at(s, start) for s in steps if pace.adoptions_at(s, start)} == {
        6: (2,), 8: (0,), 10: (1,),
    }  # fmt: skip


def test_a_whole_period_of_overlap():
    """Eager: all fragments are snapshotted on entry, and each again when it is adopted."""
    pace = Pace(sync_every=4, fragments=2, overlap_steps=4)
    assert pace.late_snapshots(0) == (0, 1)
    assert [(pace.adoptions_at(s), pace.snapshots_at(s)) for s in range(5)] == [
        ((), ()), ((), ()), ((0,), (0,)), ((), ()), ((1,), (1,)),
    ]  # fmt: skip


@settings(deadline=None)
@given(paces(), st.integers(0, 100))
def test_every_due_step_after_the_start_has_one_snapshot_and_one_adoption(pace, start):
    """From any start: the k-th snapshot is that of the k-th due step, at `start` if it would lie before."""
    end = start + 4 * pace.sync_every
    for p in range(pace.fragments):
        first = (p + 1) * pace.sync_every // pace.fragments
        due = [step for step in range(first, end + 1, pace.sync_every) if step > start]
        assert len(due) == 4
        adoptions = [s for s in range(end + 1) if p in pace.adoptions_at(s, start)]
        snapshots = [start] * pace.late_snapshots(start).count(p)
        snapshots += [s for s in range(end + 1) if p in pace.snapshots_at(s, start)]
        assert adoptions == due
        assert snapshots[:4] == [max(step - pace.overlap_steps, start) for step in due]
        assert all(is_due(step, p, pace.fragments, pace.sync_every) for step in due)


@settings(deadline=None)
@given(paces(), st.data())
def test_a_joiner_goes_on_where_the_others_are(pace, data):
    """Started at the position after a fragment, an island meets all later due steps of the others."""
    fragment = data.draw(st.integers(0, pace.fragments - 1))
    now = 3 * pace.sync_every + due_step(0, fragment, pace.fragments, pace.sync_every)
    start = pace.position_after(fragment)
    assert 0 <= start < pace.sync_every
    for own in range(1, 2 * pace.sync_every + 1):
        assert pace.adoptions_at(start + own, start) == pace.adoptions_at(now + own)


@pytest.mark.parametrize("wrong", [(3, 4, 0), (3, 0, 0), (3, 1, 4), (3, 1, -1), (0, 1, 0)])
def test_impossible_timings_are_refused(wrong):
    """More fragments than steps, or an overlap longer than a period, raise."""
    with pytest.raises(ValueError, match=r"fragments do not fit|overlap of"):
        Pace(*wrong)


def test_slow_islands_get_fewer_steps():
    """The fastest keeps H, half the speed gets half of it; unknown speeds keep H; floors hold."""
    speeds = {"slow": 50.0, "fast": 100.0, "new": 0.0, "odd": math.nan, "third": 100 / 3, "crawl": 0.1}
    assert sync_every_for(speeds, 20, 4) == {
        "slow": 10, "fast": 20, "new": 20, "odd": 20, "third": 6, "crawl": 4,
    }  # fmt: skip
    assert sync_every_for(speeds, 20, 1, overlap_steps=5)["crawl"] == 5
    assert sync_every_for({"a": 0.0, "b": 0.0}, 7, 1) == {"a": 7, "b": 7}
    assert sync_every_for({"a": 29.0, "b": 100.0}, 100, 1)["a"] == 29  # 29 / 100 * 100 is below 29
    assert sync_every_for({}, 7, 1) == {}


@given(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=6), st.integers(1, 500), st.integers(1, 16))
def test_pace_is_in_proportion_to_speed(speeds, sync_every, fragments):
    """H_i is the largest whole number with H_i * v_max <= v * H, within [fragments, H]."""
    sync_every = max(sync_every, fragments)
    result = sync_every_for({str(i): speed for i, speed in enumerate(speeds)}, sync_every, fragments)
    fastest = Fraction(max(speeds))
    for i, speed in enumerate(speeds):
        steps, exact = result[str(i)], Fraction(speed) * sync_every
        assert fragments <= steps <= sync_every
        assert steps == fragments or steps * fastest <= exact
        assert (steps + 1) * fastest > exact
