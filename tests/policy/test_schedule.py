"""The learning rate is a smooth function of progress, and progress is the same everywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.config import Inner
from elastic.policy.schedule import lr_at, progress

pytestmark = pytest.mark.unit

INNER = Inner(lr=1e-2, warmup_share=0.1, final_lr_share=0.05)


def test_the_corners_of_the_schedule():
    """Zero at the start, the peak at the end of the warm-up, the final share at the end."""
    assert lr_at(0.0, INNER) == 0.0
    assert lr_at(0.05, INNER) == pytest.approx(5e-3)
    assert lr_at(0.1, INNER) == pytest.approx(1e-2)
    assert lr_at(0.55, INNER) == pytest.approx(1e-2 * (0.05 + 0.95 * 0.5))
    assert lr_at(1.0, INNER) == pytest.approx(5e-4)


def test_progress_outside_the_budget_is_clamped():
    """A step beyond the budget has the rate of its end."""
    assert lr_at(1.7, INNER) == lr_at(1.0, INNER)
    assert lr_at(-0.1, INNER) == 0.0
    assert progress(900, 3, 100, 1000) == 1.0


@settings(deadline=None)
@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.999),
)
def test_the_schedule_has_no_jump(warmup_share, final_lr_share, at, step):
    """A small step in progress is a small step in the rate, for every shape of the schedule."""
    inner = Inner(lr=1.0, warmup_share=warmup_share, final_lr_share=final_lr_share)
    for eps in (1e-6, 1e-9):
        before, after = lr_at(at, inner), lr_at(min(at + eps, 1.0), inner)
        steepest = max(1.0 / max(warmup_share, 1e-3), 2.0 / max(1.0 - warmup_share, 1e-3))
        narrow = min(warmup_share, 1.0 - warmup_share) < 1e-3  # there a cliff is what was asked for
        assert narrow or abs(after - before) <= steepest * eps * 1.01 + 1e-12
        assert 0.0 <= before <= 1.0 + 1e-12


def test_no_warmup_starts_at_the_peak_and_all_warmup_never_falls():
    """The degenerate shares are what they say."""
    assert lr_at(0.0, Inner(lr=2.0, warmup_share=0.0)) == 2.0
    rising = Inner(lr=2.0, warmup_share=1.0)
    assert lr_at(0.5, rising) == 1.0
    assert lr_at(1.0, rising) == 2.0


def test_two_islands_agree_and_adoption_changes_nothing():
    """At the same step all islands have the same rate, and adopting a version does not move it."""
    islands, period, tokens_per_step, total = 3, 20, 3 * 16 * 256, 40 * 3 * 20 * 16 * 256
    committed = 0
    rates: dict[str, list[float]] = {"us": [], "eu": []}
    for _ in range(40):
        for name in rates:
            for own in range(1, period + 1):
                rates[name].append(lr_at(progress(committed, own, tokens_per_step, total), INNER))
        before = progress(committed, period, tokens_per_step, total)
        committed += islands * period * 16 * 256
        assert progress(committed, 0, tokens_per_step, total) == before
    assert rates["us"] == rates["eu"]
    assert rates["us"][0] > 0.0
    assert rates["us"][-1] == pytest.approx(INNER.lr * INNER.final_lr_share)
    assert max(abs(b - a) for a, b in pairwise(rates["us"])) < 2e-4


def test_a_resume_and_another_number_of_workers_change_nothing():
    """The rate depends on committed tokens alone: nothing is counted by a process."""
    whole = [lr_at(progress(0, own, 100, 10_000), INNER) for own in range(1, 41)]
    resumed = [lr_at(progress(2_000, own, 100, 10_000), INNER) for own in range(1, 21)]
    assert whole[20:] == resumed
