"""Every fragment is snapshotted and adopted once a period, at the step the rule says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.policy.pacing import Pace, due_step, is_due

pytestmark = pytest.mark.unit


def test_one_fragment_without_overlap_is_classic():
    """Snapshot and adoption both follow every H-th step."""
    pace = Pace(sync_every=5)
    assert [step for step in range(0, 21) if pace.snapshots_at(step)] == [5, 10, 15, 20]
    assert [step for step in range(0, 21) if pace.adoptions_at(step) == (0,)] == [5, 10, 15, 20]


def test_fragments_are_due_one_after_the_other():
    """Fragment p of P is due at floor((p+1)*H/P); a period of 10 in three is 3, 6, 10."""
    assert [due_step(20, fragment, 3, 10) for fragment in range(3)] == [23, 26, 30]
    pace = Pace(sync_every=10, fragments=3)
    due = {step: pace.adoptions_at(step) for step in range(1, 21) if pace.adoptions_at(step)}
    assert due == {3: (0,), 6: (1,), 10: (2,), 13: (0,), 16: (1,), 20: (2,)}


def test_a_snapshot_lies_overlap_steps_before_its_due_step():
    """It may lie in the period before; one that would lie before step 1 is skipped."""
    pace = Pace(sync_every=6, fragments=3, overlap_steps=3)  # due at 2, 4, 6
    assert {s: pace.snapshots_at(s) for s in range(0, 10) if pace.snapshots_at(s)} == {
        1: (1,), 3: (2,), 5: (0,), 7: (1,), 9: (2,),
    }  # fmt: skip
    assert {s: pace.adoptions_at(s) for s in range(0, 10) if pace.adoptions_at(s)} == {
        4: (1,), 6: (2,), 8: (0,),
    }  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 40), st.data())
def test_snapshots_and_adoptions_pair_up(sync_every, data):
    """Each fragment is due once a period, and each adoption has its snapshot overlap steps before."""
    fragments = data.draw(st.integers(1, sync_every))
    overlap = data.draw(st.integers(0, sync_every))
    pace = Pace(sync_every, fragments, overlap)
    steps = range(1, 4 * sync_every + 1)
    for fragment in range(fragments):
        snapshots = [step for step in steps if fragment in pace.snapshots_at(step)]
        adoptions = [step for step in steps if fragment in pace.adoptions_at(step)]
        assert adoptions == [step + overlap for step in snapshots if step + overlap in steps]
        assert all(later - earlier == sync_every for earlier, later in pairwise(adoptions))
        assert all(is_due(step, fragment, fragments, sync_every) for step in adoptions)
        assert len(adoptions) >= 3 - (overlap > 0)


@pytest.mark.parametrize("wrong", [(3, 4, 0), (3, 0, 0), (3, 1, 4), (3, 1, -1), (0, 1, 0)])
def test_impossible_timings_are_refused(wrong):
    """More fragments than steps, or an overlap longer than a period, raise."""
    with pytest.raises(ValueError, match=r"fragments do not fit|overlap of"):
        Pace(*wrong)
