"""What `auto` chooses: the published tables and our own measurements, and a link that keeps up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.presets import PRESETS
from elastic.policy.auto import LinkFacts, choose_outer, choose_sync_every, lr_for_islands, table_lr

pytestmark = pytest.mark.unit

# Streaming DiLoCo, table 4: the 1B model, 16 bits for each of 0.84e9 values, steps of 0.1 s, H 100
BYTES_1B = int(2 * 0.84e9)
GRID = [round(10 ** (-1 + 4 * i / 49), 2) for i in range(50)]  # Gbit/s, the paper's; printed to 0.1


@pytest.mark.parametrize(("islands", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (8, 0.8), (100, 0.8)])
def test_long_periods_take_the_papers_table(islands, lr):
    """Momentum 0.9 and the rate by islands, from H 30 on; beyond eight islands nothing is published."""
    for sync_every in (30, 100, 500):
        choice = choose_outer(islands, sync_every, "diloco")
        assert (choice.sync_every, choice.lr, choice.momentum) == (sync_every, lr, 0.9)
    assert "2503.09799" in choice.lr_why
    assert "4: 0.6, 8: 0.8" in choice.lr_why


def test_between_the_columns_it_is_linear_in_log2():
    """Six islands lie log2(6/4) = 0.585 of the way from four to eight: 0.6 + 0.585 * 0.2."""
    assert table_lr(6) == pytest.approx(0.6 + 0.2 * math.log2(1.5), abs=5e-5)


def test_short_periods_take_what_was_measured():
    """Two islands, H 20: 0.7 / 0.8; others by the ratios 0.4/0.6, 1 and 0.8/0.6."""
    for preset in ("diloco", "streaming", "decoupled"):
        choice = choose_outer(2, 20, preset)
        assert (choice.lr, choice.momentum) == (0.7, 0.8)
        assert (choice.lr, choice.momentum) == (PRESETS[preset].lr, PRESETS[preset].momentum)
    for islands, factor in ((1, 2 / 3), (4, 1.0), (8, 4 / 3)):
        choice = choose_outer(islands, 29, "diloco")
        assert choice.lr == pytest.approx(0.7 * factor)
        assert choice.momentum == 0.8
    assert "learning.md" in choice.lr_why
    assert "over-drives" in choice.momentum_why
    assert "H 29" in choice.momentum_why


def test_averaging_stays_averaging():
    """Without outer momentum there is nothing to choose: 1 and 0 for any number of islands."""
    for preset in ("average", "synchronous"):
        for islands in (1, 8):
            choice = choose_outer(islands, 100, preset)
            assert (choice.lr, choice.momentum) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("before", "now", "factor"), [(2, 8, 4 / 3), (8, 1, 0.5), (4, 2, 1.0), (9, 300, 1.0)]
)
def test_a_changed_number_of_islands(before, now, factor):
    """The rate moves by the ratio of the table, and exactly back when the islands do."""
    assert lr_for_islands(0.7, before, now) == pytest.approx(0.7 * factor)
    assert lr_for_islands(0.7, before, before) == 0.7


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([20, 100]))
def test_a_run_that_changes_ends_where_one_that_began_so_is(before, now, sync_every):
    """Choosing for M and then changing to N is choosing for N."""
    changed = lr_for_islands(choose_outer(before, sync_every, "diloco").lr, before, now)
    assert changed == pytest.approx(choose_outer(now, sync_every, "diloco").lr)


@pytest.mark.parametrize(
    ("fragments", "overlap", "utilisation", "gbit"),
    [(1, 0, 0.5, 1.4), (1, 0, 0.8, 6.2), (1, 0, 0.9, 13.3), (8, 1, 0.5, 1.4), (8, 1, 0.8, 4.3)],
)
def test_the_published_bandwidth_of_h_100_asks_for_about_h_100(fragments, overlap, utilisation, gbit):
    """At the bandwidth the paper needs H 100 is enough, one step of its grid lower it is not."""
    at = [round(step, 1) for step in GRID].index(gbit)
    lower, needed = GRID[at - 1 : at + 1]
    enough, _ = choose_sync_every(BYTES_1B, needed * 1e3, 0.1, utilisation, fragments, overlap)
    too_short, _ = choose_sync_every(BYTES_1B, lower * 1e3, 0.1, utilisation, fragments, overlap)
    assert enough <= 100 < too_short


def test_the_conservation_bound_rules_when_all_is_hidden():
    """1 MB over 8 Mbit/s lasts 10 steps of 0.1 s; hidden by 4 x 3 steps, H is 0.9 of that."""
    period, why = choose_sync_every(1_000_000, 8.0, 0.1, 0.9, fragments=4, overlap_steps=3)
    assert period == 9
    assert why == (
        "1000000 bytes at 8 Mbit/s last 10 steps of 0.1 s; utilisation 0.9 needs H >= 9: "
        "conservation bound W >= N*bits/(H*step)"
    )
    assert choose_sync_every(1_000_000, 8.0, 0.1, 0.9)[0] == 90  # nothing hidden: 10 of 100 steps wait
    assert choose_sync_every(1_000_000, 8.0, 0.1, 0.9, 4, 2)[0] == 18  # 2 of 20 steps wait
    assert "published" in choose_sync_every(1_000_000, 1.0, 0.1, 0.9)[1]


def test_the_period_has_room_for_fragments_and_overlap():
    """A fast link leaves the shortest period that is possible at all."""
    assert choose_sync_every(1000, 1e6, 1.0, 0.95, fragments=6)[0] == 6
    assert choose_sync_every(1000, 1e6, 1.0, 0.95, fragments=2, overlap_steps=5)[0] == 5
    assert choose_sync_every(0, 1e6, 1.0, 0.95)[0] == 1


@settings(deadline=None)
@given(st.integers(1, 10**12), st.floats(0.1, 1e6), st.floats(1e-3, 100), st.floats(0.05, 0.99), st.data())
def test_the_period_is_the_shortest_that_keeps_the_utilisation(size, mbit, step_s, share, data):
    """Played through, with each fragment sent while `overlap` steps are taken: H does, H - 1 would not."""
    fragments, overlap = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5))

    def utilisation(period: int) -> float:
        each = size / fragments * 8 / (mbit * 1e6)
        waits = fragments * max(0.0, each - overlap * step_s)
        return period * step_s / max(period * step_s + waits, fragments * each)

    period, _ = choose_sync_every(size, mbit, step_s, share, fragments, overlap)
    assert period >= max(fragments, overlap)
    assert utilisation(period) >= share * (1 - 1e-6)
    if period - 1 >= max(fragments, overlap, 1):
        assert utilisation(period - 1) <= share * (1 + 1e-6)


def test_auto_sync_every_is_the_presets_unless_the_link_is_slow():
    """The preset's H is a floor, as its other values were measured with it; a slow link lengthens it."""
    assert choose_outer(2, None, "diloco").sync_every == PRESETS["diloco"].sync_every
    facts = {"bytes_per_outer_step": 1_000_000, "step_s": 0.1, "utilisation": 0.9}
    fast = choose_outer(2, None, "diloco", LinkFacts(mbit_per_s=1000.0, **facts))
    assert fast.sync_every == PRESETS["diloco"].sync_every
    assert "enough" in fast.sync_every_why
    slow = choose_outer(2, None, "diloco", LinkFacts(mbit_per_s=8.0, **facts))
    assert (slow.sync_every, slow.lr, slow.momentum) == (90, 0.6, 0.9)  # and the rate follows the period
    given_one = choose_outer(2, 7, "diloco", LinkFacts(mbit_per_s=8.0, **facts))
    assert (given_one.sync_every, given_one.momentum) == (7, 0.8)


@pytest.mark.parametrize(
    "wrong", [(1, 0.0, 1.0, 0.5), (1, 1.0, 0.0, 0.5), (1, 1.0, 1.0, 1.0), (-1, 1.0, 1.0, 0.5)]
)
def test_impossible_facts_are_refused(wrong):
    """No bandwidth, no step, or computing all of the time, raise."""
    with pytest.raises(ValueError, match=r"positive|utilisation"):
        choose_sync_every(*wrong)
    with pytest.raises(ValueError, match="at least 1"):
        choose_outer(0, 20, "diloco")
