"""Whatever joins, leaves, is delayed, repeated, reordered or late: the promises of a round hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic.base.ranges import EMPTY, RangeSet
from elastic.policy.ledger import Ledger
from elastic.policy.rounds import Contribution, Merge, Rounds, Rules

pytestmark = pytest.mark.unit

ISLANDS = ("a", "b", "c", "d")
POSITIONS, BLOCK = 4000, 3
INDEX = st.integers(0, 10**6)
SELDOM = st.sampled_from([False, False, False, True])
GRACES = st.sampled_from([0.0, 1.0, 4.0])
SLACKS = st.sampled_from([0.0, 0.5, 2.0, math.inf, math.inf])
RULES = st.builds(
    Rules,
    weights=st.sampled_from(["tokens", "uniform", "tokens_rate"]),
    quorum=st.sampled_from([None, 1, 2, 3, 9]),
    grace_s=GRACES,
    staleness_discount=st.sampled_from([0.0, 0.5, 2.0]),
    max_staleness=st.integers(0, 3),
    partial=st.sampled_from(["share", "full"]),
)


@dataclass
class Island:
    """An island as the model sees it; `todo`: by fragment, data that is not handed in yet."""

    generation: int
    todo: list[RangeSet]
    bases: list[int]
    seq: int = 0


@dataclass
class Message:
    """One part on its way; it may arrive several times or never."""

    header: Contribution
    rank: int
    problem: str


@dataclass
class Waiting:
    """What the model knows of an open round, by itself and without haste."""

    answered: dict[str, float] = field(default_factory=dict)
    """When each must adopt."""
    full_s: float | None = None
    shrunk: bool = False
    """An island went, so that a grace may end earlier than the model's plain rule says."""


def raw_weight(header: Contribution, by: str) -> float:
    """The weight before it is normalised and before staleness, as DESIGN says."""
    if by == "uniform":
        return 1.0 if header.steps else 0.0
    if not header.tokens:
        return 0.0
    return header.tokens * (header.tokens / header.steps if by == "tokens_rate" else 1.0)


class AnyTrouble(RuleBasedStateMachine):
    """A synchronizer and up to four islands, with a network that does what it likes."""

    @initialize(rules=RULES, fragments=st.integers(1, 2))
    def start(self, rules: Rules, fragments: int) -> None:
        """Two islands are there, no time has passed."""
        self.rules, self.count, self.now = rules, fragments, 0.0
        self.rounds = Rounds(fragments, rules)
        self.ledger = Ledger(POSITIONS, BLOCK, fragments)
        self.live: dict[str, Island] = {}
        self.generations = dict.fromkeys(ISLANDS, 0)
        self.network: list[Message] = []
        self.versions = [0] * fragments
        self.fates: dict[str, str] = {}
        """By id: merged, refused or dropped."""
        self.complete: list[dict[str, Contribution]] = [{} for _ in range(fragments)]
        self.incomplete: list[dict[str, Contribution]] = [{} for _ in range(fragments)]
        self.waiting = [Waiting() for _ in range(fragments)]
        for island in ISLANDS[:2]:
            self._start(island)

    # ------------------------------------------------------------------------- the islands

    @rule(island=st.sampled_from(ISLANDS), restart=SELDOM)
    def join(self, island: str, restart: bool) -> None:
        """An island comes, or starts anew."""
        if island not in self.live or restart:
            self._start(island)

    @rule(island=st.sampled_from(ISLANDS), really=SELDOM)
    def leave(self, island: str, really: bool) -> None:
        """It is lost."""
        if really:
            self._lose(island)

    def _start(self, island: str) -> None:
        """A new incarnation starts from the current versions; an old one is over."""
        self._lose(island)
        self.generations[island] += 1
        generation = self.generations[island]
        self._drop(self.rounds.join(island, generation))
        for waiting in self.waiting:
            if waiting.answered.pop(island, None) is not None:
                waiting.shrunk = True
        self.live[island] = Island(generation, [EMPTY] * self.count, list(self.versions))
        self._look()

    def _lose(self, island: str) -> None:
        """What it has not handed in completely goes back to the queue."""
        if self.live.pop(island, None) is None:
            return
        self._drop(self.rounds.withdraw(island))
        self.ledger.release(island, keep=self.rounds.pending_ranges(island))
        for waiting in self.waiting:
            waiting.shrunk = True
        self._look()

    @precondition(lambda self: self.live)
    @rule(who=INDEX)
    def train(self, who: int) -> None:
        """It leases a block and trains it."""
        name = self._someone(who)
        granted = self.ledger.lease(name, self.live[name].generation, sorted(self.live))
        if granted is not None:
            self.live[name].todo = [todo | RangeSet([granted]) for todo in self.live[name].todo]

    @precondition(lambda self: self.live)
    @rule(who=INDEX, which=INDEX)
    def adopt(self, who: int, which: int) -> None:
        """It takes over the current version of a fragment; until then it works on from an older one."""
        self.live[self._someone(who)].bases[which % self.count] = self.versions[which % self.count]

    @precondition(lambda self: self.live)
    @rule(
        who=INDEX,
        which=INDEX,
        parts=st.integers(1, 2),
        steps=st.integers(0, 4),
        bad=SELDOM,
    )
    def send(self, who: int, which: int, parts: int, steps: int, bad: bool) -> None:
        """It hands in what it has done for a fragment: its parts are on their way."""
        name, fragment = self._someone(who), which % self.count
        island = self.live[name]
        island.seq += 1
        ranges, island.todo[fragment] = island.todo[fragment], EMPTY
        header = Contribution(
            island=name,
            generation=island.generation,
            fragment=fragment,
            seq=island.seq,
            base_version=island.bases[fragment],
            from_step=0,
            to_step=steps,
            tokens=len(ranges) * steps,
            steps=steps,
            ranges=ranges,
            parts=parts,
        )
        for rank in range(parts):
            self.network.append(
                Message(header, rank, "its values are not finite" if bad and not rank else "")
            )

    @precondition(lambda self: self.live)
    @rule(who=INDEX, which=INDEX, late=SELDOM, slack_s=SLACKS)
    def hand_in(self, who: int, which: int, late: bool, slack_s: float) -> None:
        """What happens when nothing is in the way: it trains a block, and what it sends arrives at once."""
        self.train(who)
        if not late:
            self.adopt(who, which)
        self.send(who, which, parts=1, steps=3, bad=False)
        self._deliver(self.network[-1], slack_s)

    # ------------------------------------------------------------------------- the network

    @precondition(lambda self: self.network)
    @rule(newest=st.integers(0, 5), slack_s=SLACKS)
    def arrive(self, newest: int, slack_s: float) -> None:
        """One of the last few messages arrives. It stays on its way, so that it may arrive again."""
        self._deliver(self.network[-1 - min(newest, len(self.network) - 1)], slack_s)

    @precondition(lambda self: self.network)
    @rule(which=INDEX)
    def arrive_late(self, which: int) -> None:
        """A message of any age arrives, perhaps again."""
        self._deliver(self.network[which % len(self.network)], math.inf)

    @rule(seconds=st.sampled_from([0.25, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        """Time passes; the synchronizer looks at every deadline on the way, as it says itself."""
        until = self.now + seconds
        while (deadline := self.rounds.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self._look()
            assert self.rounds.next_deadline() != deadline, "a deadline that never ends"
        self.now = until
        self._look()

    def _deliver(self, message: Message, slack_s: float) -> None:
        header, live = message.header, set(self.live)
        fragment, before = header.fragment, self.fates.get(header.id)
        receipt = self.rounds.offer(
            header, message.rank, live, message.problem, now=self.now, slack_s=slack_s
        )
        waiting = self.waiting[fragment]
        if before is not None:
            # Its fate is decided: no repeat may change that.
            assert receipt.status in (("duplicate", "refused") if before == "merged" else ("refused",))
        elif header.id in self.complete[fragment]:
            assert receipt.status == "duplicate"
        elif receipt.status == "accepted":
            self.incomplete[fragment].pop(header.id, None)
            self.complete[fragment][header.id] = header
            if header.base_version == self.versions[fragment]:
                self._answer(waiting, header.island, self.now + slack_s)
        elif receipt.status == "waiting-parts":
            self.incomplete[fragment][header.id] = header
        elif receipt.status == "refused":
            assert header.id in receipt.reason or header.island in receipt.reason
            assert receipt.dropped == ((header.id,) if header.id in self.incomplete[fragment] else ())
            self.incomplete[fragment].pop(header.id, None)
            self.fates[header.id] = "refused"
            if "finite" in receipt.reason:
                self._answer(waiting, header.island, math.inf)
            self._note_quorum()
            self._look()
            if header.island in self.live and header.generation == self.generations[header.island]:
                self._start(header.island)  # it starts anew, and its data goes back
            return
        if receipt.status == "accepted":
            self._drop(receipt.dropped)
        self._look()

    def _answer(self, waiting: Waiting, island: str, adopts_s: float) -> None:
        waiting.answered[island] = min(adopts_s, waiting.answered.get(island, math.inf))

    # --------------------------------------------------------------------- the synchronizer

    def _look(self) -> None:
        """Close what is due, again and again, as the synchronizer does."""
        self._note_quorum()
        for fragment in range(self.count):
            while (merge := self.rounds.close(fragment, set(self.live), self.now)) is not None:
                self._check_due(fragment)
                self._check(fragment, merge)
                self._commit(merge)
                self.waiting[fragment] = Waiting()
            self._check_wait(fragment)

    def _check(self, fragment: int, merge: Merge) -> None:
        """A version is published once and in order, and holds all that waits, with the right weights."""
        assert (merge.fragment, merge.version) == (fragment, self.versions[fragment] + 1)
        order = [(header.island, header.generation, header.seq) for header in merge.contributions]
        assert order == sorted(order)
        assert {header.id for header in merge.contributions} == set(self.complete[fragment])
        raw = [raw_weight(header, self.rules.weights) for header in merge.contributions]
        for weight, share, header in zip(merge.weights, raw, merge.contributions, strict=True):
            late = merge.version - 1 - header.base_version
            assert 0 <= late <= self.rules.max_staleness
            right = share / sum(raw) / (1 + self.rules.staleness_discount * late) if share else 0.0
            assert weight == pytest.approx(right)
        assert sum(merge.weights) <= 1.0 + 1e-12
        assert 0.0 <= merge.scale <= 1.0
        assert merge.moves == (merge.scale > 0.0)
        gone = [
            header.id
            for header in self.incomplete[fragment].values()
            if merge.version - header.base_version > self.rules.max_staleness
        ]
        assert sorted(merge.dropped) == sorted(gone)

    def _commit(self, merge: Merge) -> None:
        """The ledger merges each range once per fragment, or it raises."""
        fragment = merge.fragment
        self.versions[fragment] = merge.version
        self.complete[fragment].clear()
        for header in merge.contributions:
            assert header.id not in self.fates
            self.fates[header.id] = "merged"
            self.ledger.merge(header.island, header.generation, fragment, header.ranges)
        for header in merge.contributions:  # all are merged before the first of them is released
            island = self.live.get(header.island)
            if island is None or island.generation != header.generation:
                keep = self.rounds.pending_ranges(header.island)
                self.ledger.release(header.island, header.generation, keep=keep)
        self._drop(merge.dropped)

    def _drop(self, ids: tuple[str, ...]) -> None:
        for name in ids:
            assert name not in self.fates, "dropped, although its fate was decided"
            self.fates[name] = "dropped"
            assert any(waiting.pop(name, None) for waiting in self.incomplete)

    # ------------------------------------------------------------------------------ waiting

    def _needed(self) -> int:
        return len(self.live) if self.rules.quorum is None else min(self.rules.quorum, len(self.live))

    def _note_quorum(self) -> None:
        for waiting in self.waiting:
            full = len(waiting.answered.keys() & self.live.keys()) >= self._needed()
            waiting.full_s = (self.now if waiting.full_s is None else waiting.full_s) if full else None

    def _grace_ends(self, waiting: Waiting) -> float:
        """By the longest grace, and by the patience of the live islands that wait."""
        assert waiting.full_s is not None
        patience = [waiting.answered[name] for name in self.live if name in waiting.answered]
        return min(waiting.full_s + self.rules.grace_s, max(min(patience), waiting.full_s))

    def _check_due(self, fragment: int) -> None:
        """It closed: everybody was in, or the quorum was and the grace is over."""
        waiting = self.waiting[fragment]
        if waiting.answered.keys() >= self.live.keys():
            return
        assert self.rules.quorum is not None
        assert waiting.full_s is not None, "closed without its quorum"
        assert waiting.shrunk or self.now >= self._grace_ends(waiting), "closed before its time"

    def _check_wait(self, fragment: int) -> None:
        """It did not close: it need not, or had nothing to merge. Nobody waits beyond his deadline."""
        waiting = self.waiting[fragment]
        something = self.complete[fragment] or waiting.answered
        if not something:
            return
        assert not waiting.answered.keys() >= self.live.keys(), "everybody is in"
        if self.rules.quorum is not None and waiting.full_s is not None:
            ends = self._grace_ends(waiting)
            assert self.now < ends, "somebody waits beyond his deadline"
            deadline = self.rounds.next_deadline()
            assert deadline is not None
            assert deadline <= ends

    # --------------------------------------------------------------------------- invariants

    @invariant()
    def every_contribution_has_one_fate(self) -> None:
        """Merged, refused, dropped, or still pending; never two of them."""
        for fragment in range(self.count):
            complete, incomplete = self.complete[fragment].keys(), self.incomplete[fragment].keys()
            assert not complete & incomplete
            assert not (complete | incomplete) & self.fates.keys()

    @invariant()
    def every_position_is_in_one_place(self) -> None:
        """Committed once, leased once, or free; and what waits for its merge stays leased."""
        self.ledger.check()
        for name in ISLANDS:
            held = [ranges for holder, ranges in self.ledger.leased.items() if holder[0] == name]
            assert self.rounds.pending_ranges(name) <= RangeSet(pair for ranges in held for pair in ranges)

    @invariant()
    def versions_agree(self) -> None:
        """Nothing but a merge raises a version."""
        assert self.rounds.versions == self.versions

    def _someone(self, who: int) -> str:
        return sorted(self.live)[who % len(self.live)]


TestAnyTrouble = AnyTrouble.TestCase
TestAnyTrouble.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


# ------------------------------------------------------------------------- order of arrival


@st.composite
def _parts(draw: Callable[..., Any]) -> list[tuple[Contribution, int, str]]:
    """Parts for one round: of each island one contribution of several ranks, or several of one rank."""
    parts: list[tuple[Contribution, int, str]] = []
    for island in ISLANDS:
        ranks, seqs = draw(st.sampled_from([(1, 1), (3, 1), (1, 3)]))
        for seq in range(seqs):
            steps = draw(st.integers(0, 3))
            header = Contribution(
                island=island,
                generation=1,
                fragment=0,
                seq=seq,
                base_version=2 if seq == seqs - 1 else draw(st.integers(0, 2)),
                from_step=0,
                to_step=steps,
                tokens=steps * draw(st.integers(1, 1000)),
                steps=steps,
                ranges=EMPTY,
                parts=ranks,
            )
            bad = draw(st.sampled_from([-1, -1, 0]))
            parts += [(header, rank, "not finite" if rank == bad else "") for rank in range(ranks)]
    return parts


@settings(max_examples=150, deadline=None)
@given(parts=_parts(), rules=RULES, data=st.data())
def test_the_order_of_arrival_changes_nothing(parts, rules, data):
    """The same parts in two orders: the same merge, to the last bit."""
    rules = replace(rules, max_staleness=2, grace_s=9.0)
    merges = []
    for order in (parts, data.draw(st.permutations(parts))):
        rounds = Rounds(rules=rules, versions=[2])
        for header, rank, problem in order:
            rounds.offer(header, rank, set(ISLANDS), problem)
        # Some may be missing: the answers that are there close the round at the end of its grace.
        merges.append(rounds.close(0, ISLANDS[:3], now=0.0) or rounds.close(0, set(ISLANDS), now=99.0))
    assert merges[0] == merges[1]
    assert merges[0] is not None
