"""A round merges what was handed in, once, whatever the order and whoever repeats himself."""

from __future__ import annotations

import itertools
import random

import pytest

from elastic.base.ranges import EMPTY, RangeSet
from elastic.policy.rounds import Contribution, Merge, Rounds, Rules

pytestmark = pytest.mark.unit

BOTH = ["eu", "us"]


def contribution(island: str, seq: int = 0, /, **changes) -> Contribution:
    """A valid contribution with changes."""
    fields = {
        "island": island,
        "generation": 1,
        "fragment": 0,
        "seq": seq,
        "base_version": 0,
        "from_step": 0,
        "to_step": 10,
        "tokens": 100,
        "steps": 10,
        "ranges": EMPTY,
        "parts": 1,
    }
    return Contribution(**{**fields, **changes})


def test_a_round_closes_when_every_live_island_is_in():
    """Quorum all: nobody who is live is left out, and the version rises by one."""
    rounds = Rounds()
    assert rounds.close(0, BOTH) is None
    assert rounds.offer(contribution("us", tokens=300), 0, BOTH).status == "accepted"
    assert rounds.close(0, BOTH) is None
    assert rounds.waiting_for(0, BOTH) == ["eu"]
    rounds.offer(contribution("eu"), 0, BOTH)
    merge = rounds.close(0, BOTH)
    assert merge is not None
    assert (merge.version, rounds.versions) == (1, [1])
    assert [item.id for item in merge.contributions] == ["eu/1/0/0", "us/1/0/0"]
    assert merge.weights == (0.25, 0.75)
    assert (merge.scale, merge.moves, merge.tokens) == (1.0, True, 400)
    assert rounds.close(0, BOTH) is None, "a version is published once"


def test_the_result_does_not_depend_on_the_order_of_arrival():
    """Any order of all parts of all islands gives the same merge."""
    live = ["a", "b", "c"]
    parts = [
        (contribution(island, tokens=7 + ord(island), parts=2), rank) for island in live for rank in (0, 1)
    ]
    merges: list[Merge | None] = []
    for order in itertools.islice(itertools.permutations(parts), 0, None, 37):
        rounds = Rounds()
        for header, rank in order:
            rounds.offer(header, rank, live)
        merges.append(rounds.close(0, live))
    assert merges[0] is not None
    assert all(merge == merges[0] for merge in merges)


def test_parts_count_only_when_all_are_there():
    """A contribution of three ranks is in when rank 0, 1 and 2 have sent their rows."""
    rounds = Rounds()
    header = contribution("us", parts=3)
    assert rounds.offer(header, 2, ["us"]).status == "waiting-parts"
    assert rounds.offer(header, 0, ["us"]).status == "waiting-parts"
    assert rounds.offer(header, 2, ["us"]).status == "duplicate"
    assert rounds.close(0, ["us"]) is None
    assert rounds.offer(header, 1, ["us"]).status == "accepted"
    assert rounds.close(0, ["us"]) is not None


def test_duplicates_are_ignored_before_and_after_the_merge():
    """A message that is sent again because its answer was lost changes nothing."""
    rounds = Rounds()
    rounds.offer(contribution("us"), 0, ["us"])
    assert rounds.offer(contribution("us"), 0, ["us"]).status == "duplicate"
    assert rounds.close(0, ["us"]) is not None
    assert rounds.offer(contribution("us"), 0, ["us"]).status == "duplicate"
    assert rounds.close(0, ["us"]) is None


@pytest.mark.parametrize(
    ("changes", "rank", "reason"),
    [
        ({"base_version": 3}, 0, "us/1/0/0 starts from version 3, 4 is current"),
        ({"base_version": 5}, 0, "us/1/0/0 starts from version 5, 4 is current"),
        ({"base_version": 4, "fragment": 1}, 0, "us/1/1/0: there are 1 fragments, no fragment 1"),
        ({"base_version": 4, "parts": 2}, 2, "us/1/0/0 has 2 parts, no rank 2"),
        ({"base_version": 4, "kind": "gradient"}, 0, "us/1/0/0 is a gradient, this phase takes a delta"),
        ({"base_version": 4, "island": "asia"}, 0, "asia/1/0/0: island asia is not live"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(changes, rank, reason):
    """Every refusal says which contribution and why, and leaves the round open."""
    rounds = Rounds(versions=[4])
    receipt = rounds.offer(contribution("us", **changes), rank, ["us"])
    assert (receipt.status, receipt.reason) == ("refused", reason)
    assert rounds.close(0, ["us"]) is None


def test_an_older_generation_is_refused():
    """Once generation 2 was heard of, generation 1 cannot hand in anything."""
    rounds = Rounds()
    rounds.join("us", 2)
    receipt = rounds.offer(contribution("us"), 0, ["us"])
    assert receipt.reason == "generation 1 of island us is over, 2 is current"


def test_an_island_without_work_weighs_nothing():
    """Zero steps are a valid answer: no wait, no weight, under both rules."""
    for rule, weights in (("tokens", (0.0, 0.25, 0.75)), ("uniform", (0.0, 0.5, 0.5))):
        live = ["a", "b", "c"]
        rounds = Rounds(rules=Rules(weights=rule))
        for island, steps, tokens in (("a", 0, 0), ("b", 2, 20), ("c", 6, 60)):
            rounds.offer(contribution(island, steps=steps, tokens=tokens), 0, live)
        merge = rounds.close(0, live)
        assert merge is not None
        assert merge.weights == weights
        assert merge.scale == 1.0


def test_if_nobody_trained_nothing_moves():
    """All weights zero: the version rises and the merge says that nothing moves."""
    rounds = Rounds()
    for island in BOTH:
        rounds.offer(contribution(island, steps=0, tokens=0), 0, BOTH)
    merge = rounds.close(0, BOTH)
    assert merge is not None
    assert (merge.version, merge.weights, merge.scale, merge.moves) == (1, (0.0, 0.0), 0.0, False)


def test_a_lost_island_is_not_waited_for_and_its_complete_work_merges():
    """What was handed in completely before the loss is merged; incomplete work is void."""
    live = ["a", "b", "c"]
    rounds = Rounds()
    rounds.offer(contribution("a", ranges=RangeSet([(0, 4)])), 0, live)
    rounds.offer(contribution("b", parts=2), 0, live)
    rounds.offer(contribution("c"), 0, live)
    assert rounds.pending_ranges("a") == RangeSet([(0, 4)])
    assert rounds.withdraw("a") == ()
    assert rounds.withdraw("b") == ("b/1/0/0",)
    merge = rounds.close(0, ["c"])
    assert merge is not None
    assert [item.island for item in merge.contributions] == ["a", "c"]
    assert merge.scale == 1.0
    assert rounds.pending_ranges("a") == EMPTY


def test_a_restarted_island_is_waited_for_again():
    """An older generation's complete work still merges but is not the answer of the new one."""
    rounds = Rounds()
    rounds.offer(contribution("us"), 0, BOTH)
    rounds.offer(contribution("eu"), 0, BOTH)
    assert rounds.join("us", 2) == ()
    assert rounds.close(0, BOTH) is None
    rounds.offer(contribution("us", generation=2), 0, BOTH)
    merge = rounds.close(0, BOTH)
    assert merge is not None
    assert [item.id for item in merge.contributions] == ["eu/1/0/0", "us/1/0/0", "us/2/0/0"]
    assert sum(merge.weights) == pytest.approx(1.0)


def test_the_parts_of_a_generation_that_is_over_are_void():
    """A new generation may have another number of ranks; old parts never complete it."""
    rounds = Rounds()
    rounds.offer(contribution("us", parts=2), 0, ["us"])
    assert rounds.join("us", 2) == ("us/1/0/0",)
    assert rounds.offer(contribution("us", generation=2, parts=1), 0, ["us"]).status == "accepted"


def test_a_newer_complete_contribution_voids_an_older_incomplete_one():
    """A part that was lost on the way cannot pile up memory at the synchronizer."""
    rounds = Rounds()
    rounds.offer(contribution("us", 0, parts=2), 0, BOTH)
    rounds.offer(contribution("us", 1, parts=2), 0, BOTH)
    receipt = rounds.offer(contribution("us", 1, parts=2), 1, BOTH)
    assert (receipt.status, receipt.dropped) == ("accepted", ("us/1/0/0",))


def test_an_incomplete_contribution_left_behind_by_a_merge_is_void():
    """The merge names it, and its late parts are refused for their base version."""
    rounds = Rounds()
    rounds.offer(contribution("us", parts=2), 0, BOTH)
    rounds.offer(contribution("eu"), 0, BOTH)
    merge = rounds.close(0, ["eu"])
    assert merge is not None
    assert merge.dropped == ("us/1/0/0",)
    receipt = rounds.offer(contribution("us", parts=2), 1, BOTH)
    assert receipt.reason == "us/1/0/0 starts from version 0, 1 is current"


def test_poison_is_refused_on_all_ranks_and_nobody_waits_for_it():
    """Bad values on one rank exclude the whole contribution; the step shrinks by its share."""
    rounds = Rounds()
    header = contribution("us", parts=3, tokens=300)
    rounds.offer(header, 0, BOTH)
    receipt = rounds.offer(header, 1, BOTH, problem="non-finite values in blocks.0.norm")
    assert receipt.status == "refused"
    assert receipt.reason == "contribution us/1/0/0, rank 1: non-finite values in blocks.0.norm"
    assert receipt.dropped == ("us/1/0/0",)
    assert rounds.offer(header, 2, BOTH).reason == receipt.reason
    rounds.offer(contribution("eu"), 0, BOTH)
    merge = rounds.close(0, BOTH)
    assert merge is not None
    assert [item.island for item in merge.contributions] == ["eu"]
    assert merge.weights == (1.0,)
    assert merge.scale == 0.25, "eu alone must not move as far as both would"


def test_poison_everywhere_still_ends_the_round():
    """All islands refused: an empty merge that moves nothing, so that nobody waits for ever."""
    rounds = Rounds()
    rounds.offer(contribution("us"), 0, ["us"], problem="non-finite values")
    merge = rounds.close(0, ["us"])
    assert merge is not None
    assert (merge.version, merge.contributions, merge.moves) == (1, (), False)


def test_an_island_that_recovers_within_the_round_counts_once():
    """After a refusal the same island may hand in good work; then nothing is left out."""
    rounds = Rounds()
    rounds.offer(contribution("us", 0), 0, BOTH, problem="non-finite values")
    assert rounds.offer(contribution("us", 1), 0, BOTH).status == "accepted"
    rounds.offer(contribution("eu"), 0, BOTH)
    merge = rounds.close(0, BOTH)
    assert merge is not None
    assert merge.scale == 1.0


def test_parts_that_disagree_are_refused():
    """Ranks of one island that report different tokens are a bug that is named, not averaged."""
    rounds = Rounds()
    rounds.offer(contribution("us", parts=2), 0, ["us"])
    receipt = rounds.offer(contribution("us", parts=2, tokens=99), 1, ["us"])
    assert receipt.reason == "contribution us/1/0/0, rank 1: its parts disagree about the header"


def test_gradients_are_counted_by_their_own_rounds():
    """The version is the number of the step, and a mean gradient is never scaled."""
    steps = Rounds(kind="gradient", versions=[41])
    for island, problem in (("eu", ""), ("us", "non-finite values")):
        steps.offer(contribution(island, kind="gradient", base_version=41, steps=1), 0, BOTH, problem)
    merge = steps.close(0, BOTH)
    assert merge is not None
    assert (merge.version, merge.weights, merge.scale) == (42, (1.0,), 1.0)


def test_fragments_are_independent():
    """Each fragment has its own version and its own open round."""
    rounds = Rounds(fragments=3)
    rounds.offer(contribution("us", fragment=1), 0, ["us"])
    assert rounds.close(0, ["us"]) is None
    assert rounds.close(1, ["us"]) is not None
    assert rounds.versions == [0, 1, 0]
    with pytest.raises(ValueError, match="3 fragments, but 1 versions"):
        Rounds(fragments=3, versions=[0])


def test_any_trouble_leaves_each_contribution_with_one_fate():
    """Under random joins, losses, repeats and reordering each complete contribution merges once."""
    for seed in range(30):
        rng = random.Random(seed)
        rounds, generations = Rounds(), {name: 1 for name in "abc"}
        live, seqs = set("abc"), itertools.count()
        merged: list[str] = []
        accepted: set[str] = set()
        sent: list[tuple[Contribution, int]] = []
        for _ in range(200):
            action, island = (
                rng.choice(["send", "repeat", "repeat", "repeat", "lose", "join"]),
                rng.choice("abc"),
            )
            if action == "send":
                header = contribution(
                    island,
                    next(seqs),
                    generation=generations[island],
                    parts=2,
                    base_version=rounds.versions[0],
                )
                sent += [(header, 0), (header, 1)]
            elif action == "repeat" and sent:
                header, rank = rng.choice(sent)
                if rounds.offer(header, rank, live).status == "accepted":
                    accepted.add(header.id)
            elif action == "lose":
                live.discard(island)
                rounds.withdraw(island)
            elif action == "join" and island not in live:
                generations[island] += 1
                live.add(island)
                rounds.join(island, generations[island])
            version = rounds.versions[0]
            merge = rounds.close(0, live)
            if merge is not None:
                assert merge.version == version + 1
                assert sum(merge.weights) == pytest.approx(1.0)
                merged += [header.id for header in merge.contributions]
        assert len(merged) == len(set(merged)), "merged twice"
        assert set(merged) <= accepted


def test_a_version_from_elsewhere_voids_the_open_round():
    """After a synchronous stretch the fragment stands at the anchor; older deltas are refused."""
    rounds = Rounds()
    rounds.offer(contribution("us"), 0, BOTH)
    rounds.offer(contribution("eu", parts=2), 0, BOTH)
    assert rounds.advance(0, 9) == ("us/1/0/0", "eu/1/0/0")
    assert rounds.versions == [9]
    assert rounds.waiting_for(0, BOTH) == BOTH
    assert rounds.offer(contribution("us"), 0, BOTH).reason == "us/1/0/0 starts from version 0, 9 is current"


# ------------------------------------------------------------------- quorum, grace, staleness


DECOUPLED = Rules(quorum=1, grace_s=2.0, max_staleness=2, staleness_discount=0.5)


def test_a_round_closes_when_the_grace_for_the_rest_is_over():
    """One of two is in at 10 s; two seconds later the round closes with half of the expected tokens."""
    rounds, live = Rounds(rules=DECOUPLED), ["a", "b"]
    assert rounds.next_deadline() is None
    rounds.offer(contribution("a", tokens=30), 0, live, now=10.0)
    assert rounds.close(0, live, now=10.0) is None
    assert rounds.next_deadline() == 12.0
    assert rounds.close(0, live, now=11.9) is None
    merge = rounds.close(0, live, now=12.0)
    assert merge is not None
    assert (merge.version, merge.weights, merge.scale) == (1, (1.0,), 0.5)
    assert rounds.next_deadline() is None


def test_nobody_waits_longer_than_it_can_spare():
    """The island that is in must adopt in half a second: the grace ends then."""
    rounds, live = Rounds(rules=DECOUPLED), ["a", "b"]
    rounds.offer(contribution("a"), 0, live, now=10.0, slack_s=0.5)
    assert rounds.close(0, live, now=10.4) is None
    assert rounds.next_deadline() == 10.5
    assert rounds.close(0, live, now=10.5) is not None


def test_a_late_contribution_goes_into_the_next_round_with_less_weight():
    """One version late under discount 0.5: w = 1/2 * 1/1.5; the sum is below one. It is no answer."""
    rounds, live = Rounds(rules=DECOUPLED), ["a", "b"]
    rounds.offer(contribution("a"), 0, live, now=0.0)
    assert rounds.close(0, live, now=2.0) is not None
    assert rounds.offer(contribution("b", base_version=0), 0, live, now=3.0).status == "accepted"
    assert rounds.close(0, live, now=30.0) is None
    rounds.offer(contribution("a", seq=1, base_version=1), 0, live, now=31.0)
    merge = rounds.close(0, live, now=33.0)
    assert merge is not None
    assert merge.weights == pytest.approx((0.5, 0.5 / 1.5))
    assert merge.scale == 1.0
    assert [header.island for header in merge.contributions] == ["a", "b"]
    assert rounds.offer(contribution("b", base_version=0), 0, live).status == "duplicate"


def test_a_contribution_beyond_the_allowed_staleness_is_refused_by_name():
    """Three versions late where two are allowed."""
    rounds, live = Rounds(rules=DECOUPLED, versions=[3]), ["a"]
    receipt = rounds.offer(contribution("a", base_version=0), 0, live)
    assert receipt.status == "refused"
    assert receipt.reason.endswith("starts from version 0, 3 is current; at most 2 versions late is allowed")


def test_the_missing_count_with_what_they_gave_last():
    """b gave 60 tokens last time and is missing now: 20 of 80 expected tokens are there."""
    rounds, live = Rounds(rules=DECOUPLED), ["a", "b"]
    for island, tokens in (("a", 20), ("b", 60)):
        rounds.offer(contribution(island, tokens=tokens), 0, live)
    first = rounds.close(0, live)
    assert first is not None
    assert first.scale == 1.0
    rounds.offer(contribution("a", seq=1, base_version=1, tokens=20), 0, live, now=1.0)
    second = rounds.close(0, live, now=3.0)
    assert second is not None
    assert second.scale == 0.25


def test_an_unfinished_contribution_is_carried_while_it_is_not_too_late():
    """Its second part comes in the next round; with no staleness allowed it is void, by name."""
    for rules, dropped in ((DECOUPLED, ()), (Rules(quorum=1), ("b/1/0/0",))):
        rounds, live = Rounds(rules=rules), ["a", "b"]
        rounds.offer(contribution("b", parts=2), 0, live)
        rounds.offer(contribution("a"), 0, live)
        merge = rounds.close(0, live) or rounds.close(0, live, now=2.0)
        assert merge is not None
        assert merge.dropped == dropped
        status = rounds.offer(contribution("b", parts=2), 1, live).status
        assert status == ("refused" if dropped else "accepted")


def test_weights_by_rate_favour_the_fast():
    """tokens * tokens / steps: 40*40/4 = 400 against 20*20/5 = 80 and 40*40/8 = 200."""
    rounds, live = Rounds(rules=Rules(weights="tokens_rate")), ["a", "b", "c"]
    for island, tokens, steps in (("a", 40, 4), ("b", 20, 5), ("c", 40, 8)):
        rounds.offer(contribution(island, steps=steps, tokens=tokens), 0, live)
    merge = rounds.close(0, live)
    assert merge is not None
    assert merge.weights == pytest.approx((400 / 680, 80 / 680, 200 / 680))


def test_staleness_shrinks_the_weight_of_one_without_raising_that_of_the_others():
    """Three of 10, 20, 30 tokens, 0, 1, 2 versions late, discount 1: 1/6, 2/6 * 1/2, 3/6 * 1/3."""
    rounds, live = Rounds(rules=Rules(staleness_discount=1.0, max_staleness=2), versions=[2]), ["a", "b", "c"]
    for island, tokens, base in (("a", 10, 2), ("b", 20, 1), ("c", 30, 0)):
        rounds.offer(contribution(island, tokens=tokens, base_version=base), 0, live)
    merge = rounds.close(0, ["a"])
    assert merge is not None
    assert merge.weights == pytest.approx((1 / 6, 1 / 6, 1 / 6))
    assert merge.scale == 1.0


@pytest.mark.parametrize(("partial", "scale"), [("share", 10 / 40), ("full", 1.0)])
def test_the_missing_without_a_past_count_as_the_mean_of_the_merged(partial, scale):
    """One of four is in and nobody else was ever heard of: 10 of 40 tokens, unless told otherwise."""
    rounds, live = Rounds(rules=Rules(quorum=1, partial=partial)), ["a", "b", "c", "d"]
    rounds.offer(contribution("a", tokens=10), 0, live)
    merge = rounds.close(0, live)
    assert merge is not None
    assert merge.scale == scale


def test_two_contributions_of_one_island_merge_side_by_side():
    """One version late and on time: weights by tokens; the mean of 30 stands for b, who is missing."""
    rounds, live = Rounds(rules=Rules(quorum=1, max_staleness=1), versions=[1]), ["a", "b"]
    rounds.offer(contribution("a", 4, tokens=20), 0, live)
    assert rounds.close(0, live) is None, "a late one is no answer"
    rounds.offer(contribution("a", 5, tokens=40, base_version=1), 0, live)
    merge = rounds.close(0, live)
    assert merge is not None
    assert [header.seq for header in merge.contributions] == [4, 5]
    assert merge.weights == pytest.approx((1 / 3, 2 / 3))
    assert merge.scale == pytest.approx(60 / 90)


def test_the_quorum_is_never_more_than_the_live_islands():
    """Three are wanted, two are live: both are needed, and no grace is left to wait for."""
    rounds = Rounds(rules=Rules(quorum=3, grace_s=5.0))
    rounds.offer(contribution("eu"), 0, BOTH, now=1.0)
    assert rounds.close(0, BOTH, now=100.0) is None
    rounds.offer(contribution("us"), 0, BOTH, now=101.0)
    assert rounds.close(0, BOTH, now=101.0) is not None


def test_an_island_that_leaves_during_the_grace_is_waited_for_no_longer():
    """Of three, b is missing and goes: all that are live are in at once."""
    rounds = Rounds(rules=Rules(quorum=2, grace_s=9.0))
    for island in "ac":
        rounds.offer(contribution(island), 0, ["a", "b", "c"], now=1.0)
    assert rounds.close(0, ["a", "b", "c"], now=2.0) is None
    merge = rounds.close(0, ["a", "c"], now=2.0)
    assert merge is not None
    assert merge.scale == 1.0


def test_a_quorum_that_falls_apart_is_waited_for_anew():
    """a and b of four are in and b goes: the grace counts from when c makes them two again."""
    rounds = Rounds(rules=Rules(quorum=2, grace_s=5.0))
    for island in "ab":
        rounds.offer(contribution(island), 0, ["a", "b", "c", "d"], now=0.0)
    assert rounds.close(0, ["a", "c", "d"], now=5.0) is None
    assert rounds.next_deadline() is None
    rounds.offer(contribution("c"), 0, ["a", "c", "d"], now=7.0)
    assert rounds.next_deadline() == 12.0
    assert rounds.close(0, ["a", "c", "d"], now=11.0) is None
    merge = rounds.close(0, ["a", "c", "d"], now=12.0)
    assert merge is not None
    assert [header.island for header in merge.contributions] == ["a", "b", "c"]


def test_a_new_generation_takes_back_the_answer_of_the_old_one_and_its_grace():
    """b alone was the quorum of four and starts anew: no deadline is left over."""
    rounds, live = Rounds(rules=Rules(quorum=1, grace_s=5.0)), ["a", "b", "c", "d"]
    rounds.offer(contribution("b"), 0, live, now=0.0)
    assert rounds.next_deadline() == 5.0
    rounds.join("b", 2)
    assert rounds.next_deadline() is None
    assert rounds.close(0, live, now=6.0) is None


def test_the_impatience_of_an_island_that_is_gone_hurries_nobody():
    """b could wait half a second only, and is gone: a waits its whole grace for c."""
    rounds = Rounds(rules=Rules(quorum=1, grace_s=5.0))
    rounds.offer(contribution("a"), 0, ["a", "b", "c"], now=0.0)
    rounds.offer(contribution("b"), 0, ["a", "b", "c"], now=0.0, slack_s=0.5)
    assert rounds.next_deadline() == 0.5
    assert rounds.close(0, ["a", "c"], now=0.5) is None
    assert rounds.next_deadline() == 5.0
    assert rounds.close(0, ["a", "c"], now=5.0) is not None


def test_an_island_without_any_slack_ends_the_grace_as_soon_as_the_quorum_is_in():
    """a had to adopt at 1 s; the quorum of two is in at 3 s, and nothing is waited for then."""
    rounds, live = Rounds(rules=Rules(quorum=2, grace_s=5.0)), ["a", "b", "c"]
    rounds.offer(contribution("a"), 0, live, now=0.0, slack_s=1.0)
    assert rounds.close(0, live, now=2.0) is None
    rounds.offer(contribution("b"), 0, live, now=3.0, slack_s=4.0)
    assert rounds.next_deadline() == 3.0
    assert rounds.close(0, live, now=3.0) is not None


def test_when_all_leave_what_they_handed_in_still_merges():
    """Nobody is there to be waited for; the unfinished part is void."""
    rounds = Rounds(rules=DECOUPLED)
    rounds.offer(contribution("a"), 0, ["a", "b"], now=0.0)
    rounds.offer(contribution("b", parts=2), 0, ["a", "b"], now=0.0)
    assert [*rounds.withdraw("a"), *rounds.withdraw("b")] == ["b/1/0/0"]
    merge = rounds.close(0, [], now=0.0)
    assert merge is not None
    assert [header.island for header in merge.contributions] == ["a"]
    assert rounds.close(0, [], now=99.0) is None


def test_a_refusal_for_values_is_an_answer_for_the_quorum():
    """Its announced tokens are missing from the step: 30 of 30 + 90."""
    rounds, live = Rounds(rules=Rules(quorum=2, grace_s=1.0)), ["a", "b", "c"]
    rounds.offer(contribution("a", tokens=90), 0, live, "values are not finite", now=0.0)
    assert rounds.next_deadline() is None
    rounds.offer(contribution("b", tokens=30), 0, live, now=2.0)
    assert rounds.next_deadline() == 3.0
    merge = rounds.close(0, ["a", "b"], now=2.0)
    assert merge is not None
    assert merge.scale == 30 / 120


@pytest.mark.parametrize("versions_later", range(4))
def test_what_was_refused_for_its_values_stays_refused(versions_later):
    """Its other part comes rounds later, when its staleness alone would let it in."""
    rounds, live = Rounds(rules=Rules(max_staleness=9)), ["a"]
    bad = contribution("a", 0, parts=2)
    reason = rounds.offer(bad, 0, live, "values are not finite").reason
    assert reason == "contribution a/1/0/0, rank 0: values are not finite"
    for number in range(versions_later):
        rounds.offer(contribution("a", 1 + number, base_version=number), 0, live)
        assert rounds.close(0, live) is not None
    receipt = rounds.offer(bad, 1, live)
    assert (receipt.status, receipt.reason) == ("refused", reason)


@pytest.mark.parametrize("versions_later", range(7))
def test_what_merged_long_ago_never_merges_again(versions_later):
    """However much staleness is allowed, a repeated message is known as long as it could be taken in."""
    rounds, live = Rounds(rules=Rules(max_staleness=7)), ["a"]
    for number in range(versions_later + 1):
        rounds.offer(contribution("a", number, base_version=number), 0, live)
        assert rounds.close(0, live) is not None
    assert rounds.offer(contribution("a", 0), 0, live).status == "duplicate"


def test_a_dropped_contribution_is_refused_from_then_on():
    """A newer one was complete first: what is left of the older one can never be whole."""
    rounds = Rounds()
    rounds.offer(contribution("us", 0, parts=2), 0, BOTH)
    rounds.offer(contribution("us", 1), 0, BOTH)
    receipt = rounds.offer(contribution("us", 0, parts=2), 1, BOTH)
    assert receipt.status == "refused"
    assert receipt.reason == "us/1/0/0 was dropped, incomplete, when us/1/0/1 was complete"


def test_an_older_contribution_that_was_only_late_is_taken_in():
    """The network changed the order: 1 came and merged before the first part of 0 was seen."""
    rounds, live = Rounds(rules=Rules(max_staleness=1)), ["us"]
    rounds.offer(contribution("us", 1), 0, live)
    assert rounds.close(0, live) is not None
    assert rounds.offer(contribution("us", 0), 0, live).status == "accepted"


def test_no_delta_from_before_an_anchor_is_taken_in_however_much_staleness_is_allowed():
    """After a synchronous stretch, which ended as version 3."""
    rounds = Rounds(rules=Rules(max_staleness=5))
    rounds.advance(0, 3)
    assert rounds.offer(contribution("us", base_version=2), 0, BOTH).status == "refused"
    assert rounds.offer(contribution("us", base_version=3), 0, BOTH).status == "accepted"


def test_the_grace_of_each_fragment_runs_by_itself():
    """The next look is due when the first of them ends."""
    rounds, live = Rounds(2, Rules(quorum=1, grace_s=5.0)), ["a", "b"]
    rounds.offer(contribution("a", fragment=1), 0, live, now=1.0)
    rounds.offer(contribution("a", fragment=0), 0, live, now=2.0)
    assert rounds.next_deadline() == 6.0
    assert rounds.close(0, live, now=6.0) is None
    merge = rounds.close(1, live, now=6.0)
    assert merge is not None
    assert (merge.fragment, rounds.versions) == (1, [0, 1])
    assert rounds.next_deadline() == 7.0


def test_what_an_island_forfeits_is_void_by_name_and_nobody_waits_for_it():
    """Of two fragments and two generations only the current one's contributions go; the other merges."""
    rounds, live = Rounds(2, Rules(max_staleness=1)), ["a", "b"]
    rounds.offer(contribution("b", generation=1), 0, live)
    rounds.join("b", 2)
    rounds.offer(contribution("b", generation=2), 0, live)
    rounds.offer(contribution("b", generation=2, fragment=1, parts=2), 0, live)
    assert rounds.forfeit("b", 2) == ("b/2/0/0", "b/2/1/0")
    assert rounds.offer(contribution("b", generation=2), 0, live).status == "refused"
    rounds.offer(contribution("a"), 0, live)
    merge = rounds.close(0, live)
    assert merge is not None
    assert [header.id for header in merge.contributions] == ["a/1/0/0", "b/1/0/0"]
