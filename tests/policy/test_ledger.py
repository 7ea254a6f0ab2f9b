"""Exactly once: every position is committed once or still queued, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.base.ranges import EMPTY, RangeSet
from elastic.policy.ledger import Ledger, LedgerError

pytestmark = pytest.mark.unit

BOTH = ["eu", "us"]


def test_blocks_are_dealt_by_residue_and_not_by_speed():
    """Block k belongs to island k mod M of the sorted names, in whatever order they ask."""
    ledger = Ledger(total=22, block=4)
    assert ledger.lease("us", 1, ["us", "eu"]) == (4, 8)
    assert ledger.lease("us", 1, BOTH) == (12, 16)
    assert ledger.lease("us", 1, BOTH) == (20, 22), "the last block is short"
    assert ledger.lease("us", 1, BOTH) is None, "what is left belongs to eu"
    assert [ledger.lease("eu", 1, BOTH) for _ in range(4)] == [(0, 4), (8, 12), (16, 20), None]
    ledger.check()


def test_untouched_blocks_are_dealt_anew_when_membership_changes():
    """The blocks of an island that is gone go to the others; nothing is left over."""
    ledger = Ledger(total=40, block=4)
    ledger.lease("eu", 1, BOTH)
    ledger.lease("us", 1, BOTH)
    ledger.release("us", 1)
    taken = []
    while (lease := ledger.lease("eu", 1, ["eu"])) is not None:
        taken.append(lease)
    assert taken == [(start, start + 4) for start in range(4, 40, 4)]
    ledger.check()


def test_returned_positions_go_out_first_to_whoever_asks():
    """The queue's front is what came back, at most one block at a time."""
    ledger = Ledger(total=64, block=4)
    for _ in range(3):
        ledger.lease("us", 1, BOTH)
    ledger.merge("us", 1, 0, RangeSet([(4, 6)]))
    assert ledger.release("us", 1) == RangeSet([(6, 8), (12, 16), (20, 24)])
    assert ledger.returned == RangeSet([(6, 8), (12, 16), (20, 24)])
    assert [ledger.lease("eu", 1, BOTH) for _ in range(4)] == [(6, 8), (12, 16), (20, 24), (0, 4)]
    ledger.check()


def test_a_returned_stretch_over_several_blocks_goes_out_block_by_block():
    """No lease is longer than a block."""
    ledger = Ledger(total=16, block=4)
    for _ in range(4):
        ledger.lease("eu", 1, ["eu"])
    ledger.release("eu")
    assert ledger.lease("eu", 2, ["eu"]) == (0, 4)
    assert ledger.lease("eu", 2, ["eu"]) == (4, 8)


def test_a_position_is_committed_when_every_fragment_has_merged_it():
    """The commit is the minimum over the fragments."""
    ledger = Ledger(total=8, block=8, fragments=3)
    ledger.lease("eu", 1, ["eu"])
    assert ledger.merge("eu", 1, 0, RangeSet([(0, 6)])) == EMPTY
    assert ledger.merge("eu", 1, 2, RangeSet([(0, 4)])) == EMPTY
    assert ledger.merge("eu", 1, 1, RangeSet([(2, 8)])) == RangeSet([(2, 4)])
    assert ledger.merge("eu", 1, 2, RangeSet([(4, 8)])) == RangeSet([(4, 6)])
    assert ledger.committed == RangeSet([(2, 6)])
    ledger.check()
    assert ledger.release("eu", 1) == RangeSet([(0, 2), (6, 8)])
    assert ledger.replayed_sequences == 4, "fragments 0, 1 and 2 will see some of these again"
    ledger.check()


def test_release_keeps_what_a_merge_will_still_take():
    """What a lost island handed in completely stays its own until it is merged."""
    ledger = Ledger(total=8, block=8)
    ledger.lease("eu", 1, ["eu"])
    assert ledger.release("eu", keep=RangeSet([(0, 3)])) == RangeSet([(3, 8)])
    assert ledger.merge("eu", 1, 0, RangeSet([(0, 3)])) == RangeSet([(0, 3)])
    assert ledger.replayed_sequences == 0
    ledger.check()


def test_release_of_one_generation_leaves_the_next_alone():
    """A late loss of generation 1 takes nothing from generation 2."""
    ledger = Ledger(total=16, block=4)
    ledger.lease("eu", 1, ["eu"])
    ledger.lease("eu", 2, ["eu"])
    assert ledger.release("eu", 1) == RangeSet([(0, 4)])
    assert ledger.leased == {("eu", 2): RangeSet([(4, 8)])}


def test_claim_is_all_or_nothing():
    """A restarted island gets back all it trained, or nothing changes."""
    committed = RangeSet([(0, 6)])
    ledger = Ledger(total=32, block=4, committed=committed)
    assert ledger.returned == RangeSet([(6, 8)]), "the rest of a block begun goes out first"
    assert ledger.claim("eu", 3, RangeSet([(6, 8), (13, 15)]))
    assert ledger.leased == {("eu", 3): RangeSet([(6, 8), (13, 15)])}
    assert ledger.returned == RangeSet([(12, 13), (15, 16)])
    ledger.check()
    before = (ledger.leased, ledger.free, ledger.committed)
    for wrong in ([(14, 18)], [(5, 6)], [(30, 33)], [(24, 26), (0, 1)]):
        assert not ledger.claim("us", 1, RangeSet(wrong))
        assert (ledger.leased, ledger.free, ledger.committed) == before
    assert ledger.claim("us", 1, EMPTY)


def test_merging_what_one_does_not_hold_is_refused():
    """A generation that is over, a foreign range and a second merge raise and change nothing."""
    ledger = Ledger(total=16, block=4, fragments=2)
    ledger.lease("eu", 2, BOTH)
    with pytest.raises(LedgerError, match="island eu, generation 1 hands in positions it does not hold"):
        ledger.merge("eu", 1, 0, RangeSet([(0, 4)]))
    with pytest.raises(LedgerError, match=r"saw: \[\[4, 5\]\]"):
        ledger.merge("eu", 2, 0, RangeSet([(0, 5)]))
    ledger.merge("eu", 2, 0, RangeSet([(0, 2)]))
    with pytest.raises(LedgerError, match="fragment 0 has merged positions of island eu before"):
        ledger.merge("eu", 2, 0, RangeSet([(1, 3)]))
    ledger.check()


def test_wrong_use_is_named():
    """Impossible sizes, committed positions beyond the budget and unknown islands raise."""
    with pytest.raises(LedgerError, match="at least 1"):
        Ledger(total=0, block=4)
    with pytest.raises(LedgerError, match="a budget at least as large"):
        Ledger(total=8, block=4, committed=RangeSet([(0, 9)]))
    assert not Ledger(total=8, block=4).has_for("asia", BOTH)
    with pytest.raises(LedgerError, match="asia asks for data but is not among"):
        Ledger(total=8, block=4).lease("asia", 1, BOTH)


def test_a_larger_budget_goes_on_where_the_smaller_ended():
    """A finished run continues with more tokens, the short last block first."""
    ledger = Ledger(total=30, block=4, committed=RangeSet([(0, 10)]))
    assert not ledger.done
    assert ledger.lease("eu", 1, ["eu"]) == (10, 12)
    assert ledger.lease("eu", 1, ["eu"]) == (12, 16)
    assert Ledger(total=10, block=4, committed=RangeSet([(0, 10)])).done


def test_a_billion_positions_cost_nothing():
    """Neither the size of the budget nor an island far ahead makes a lease scan blocks."""
    ledger = Ledger(total=10**9, block=1)
    for _ in range(3000):
        start, stop = ledger.lease("us", 1, BOTH)
        ledger.merge("us", 1, 0, RangeSet([(start, stop)]))
    assert ledger.lease("eu", 1, BOTH) == (0, 1)
    assert ledger.lease("us", 1, BOTH) == (6001, 6002)
    assert len(ledger.free) == 10**9 - 3002
    ledger.check()


class LedgerUnderFire(RuleBasedStateMachine):
    """Leases, merges by fragment, claims, losses, joins and restarts in any order."""

    @initialize(total=st.integers(1, 60), block=st.integers(1, 9), fragments=st.integers(1, 3))
    def start(self, total, block, fragments):
        self.total, self.block, self.fragments = total, block, fragments
        self.ledger = Ledger(total, block, fragments)
        self.live: dict[str, int] = {"a": 1}
        self.newest = {"a": 1}
        self.merged: dict[tuple[str, int], list[set[int]]] = {}
        self.committed_by: list[int] = []

    @rule(island=st.sampled_from("abc"))
    def join(self, island):
        if island in self.live:
            self.lose(island)
        self.newest[island] = self.live[island] = self.newest.get(island, 0) + 1

    @rule(island=st.sampled_from("abc"))
    def lose(self, island):
        generation = self.live.pop(island, None)
        if generation is None:
            return
        held = self.ledger.held(island, generation)
        before = self.ledger.replayed_sequences
        assert self.ledger.release(island, generation) == held
        ahead = set().union(*self.merged.pop((island, generation), [set()]))
        assert self.ledger.replayed_sequences - before == len(ahead)
        assert held <= self.ledger.returned

    @rule(island=st.sampled_from("abc"))
    def lease(self, island):
        if island not in self.live:
            return
        free = self.ledger.free
        returned = self.ledger.returned
        promised = self.ledger.has_for(island, list(self.live))
        lease = self.ledger.lease(island, self.live[island], list(self.live))
        assert promised == (lease is not None)
        if lease is None:
            assert not returned
            residue = sorted(self.live).index(island)
            blocks = {start // self.block for pair in free for start in range(*pair)}
            assert not [number for number in blocks if number % len(self.live) == residue]
            return
        start, stop = lease
        assert 0 < stop - start <= self.block
        assert free.contains(start, stop)
        assert not returned or start == returned.pairs[0][0]

    @rule(island=st.sampled_from("abc"), data=st.data())
    def claim(self, island, data):
        if island not in self.live:
            return
        start = data.draw(st.integers(0, self.total - 1))
        ranges = RangeSet([(start, start + data.draw(st.integers(1, 12)))])
        free, held = self.ledger.free, self.ledger.held(island, self.live[island])
        granted = self.ledger.claim(island, self.live[island], ranges)
        assert granted == (ranges <= free)
        assert self.ledger.held(island, self.live[island]) == (held | ranges if granted else held)

    @rule(island=st.sampled_from("abc"), data=st.data())
    def merge(self, island, data):
        generation = self.live.get(island)
        held = self.ledger.held(island, generation) if generation else EMPTY
        if not held:
            return
        fragment = data.draw(st.integers(0, self.fragments - 1))
        merged = self.merged.setdefault((island, generation), [set() for _ in range(self.fragments)])
        open_here = [p for pair in held for p in range(*pair) if p not in merged[fragment]]
        chosen = open_here[: data.draw(st.integers(0, len(open_here)))]
        result = self.ledger.merge(island, generation, fragment, RangeSet((p, p + 1) for p in chosen))
        merged[fragment].update(chosen)
        complete = set.intersection(*merged)
        assert {p for pair in result for p in range(*pair)} == complete
        self.committed_by.extend(complete)
        for positions in merged:
            positions -= complete

    @rule()
    def restart_from_the_records(self):
        committed = self.ledger.committed
        self.ledger = Ledger(self.total, self.block, self.fragments, committed)
        assert self.ledger.committed == committed
        self.live, self.merged = {}, {}
        self.join("a")

    @invariant()
    def every_position_once(self):
        if not hasattr(self, "ledger"):
            return
        self.ledger.check()
        assert len(self.committed_by) == len(set(self.committed_by)) == self.ledger.committed_count

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for island in "abc":
            self.lose(island)
        self.join("z")
        while (lease := self.ledger.lease("z", self.live["z"], ["z"])) is not None:
            for fragment in range(self.fragments):
                self.ledger.merge("z", self.live["z"], fragment, RangeSet([lease]))
        assert self.ledger.done, "whatever happened, one island alone can finish"


LedgerUnderFire.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_every_position_is_committed_once_or_queued = LedgerUnderFire.TestCase
