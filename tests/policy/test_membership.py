"""Generations rise, silence is noticed, and nobody from the past is heard."""

from __future__ import annotations

import pytest

from elastic.policy.membership import Membership

pytestmark = pytest.mark.unit


def test_generations_rise_and_survive_a_restart():
    """Each join is a new generation, above all that earlier lives gave out."""
    members = Membership(5.0, {"us": 4})
    assert members.join("us", 0.0) == 5
    assert members.join("us", 1.0) == 6
    assert members.join("eu", 1.0) == 1
    assert members.generations == {"us": 6, "eu": 1}
    assert members.live == ["eu", "us"]


def test_an_older_generation_is_refused_by_name():
    """The reason says which generation is over and which is current."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.join("us", 0.0)
    members.join("us", 0.0)
    assert members.fence("us", 2) == "generation 2 of island us is over, 3 is current"
    assert members.beat("us", 2, 100.0) == "generation 2 of island us is over, 3 is current"
    assert members.fence("us", 3) is None
    assert members.fence("us", 4) == "generation 4 of island us has not joined"
    assert members.fence("eu", 1) == "generation 1 of island eu has not joined"


def test_a_generation_of_an_earlier_life_must_join_again():
    """After a restart of the synchronizer nobody is taken for present."""
    members = Membership(5.0, {"us": 4})
    assert members.fence("us", 4) == "generation 4 of island us has not joined"
    assert members.state("us") is None
    assert members.expire(1000.0) == []


def test_silence_beyond_the_timeout_is_a_loss():
    """An island is lost once, by its own silence, and its later messages are refused."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.join("eu", 0.0)
    members.beat("us", 1, 3.0)
    assert members.expire(5.0) == []
    assert members.expire(6.0) == ["eu"]
    assert members.expire(6.0) == []
    assert members.live == ["us"]
    assert members.state("eu") == "lost"
    assert members.beat("eu", 1, 7.0) == (
        "generation 1 of island eu was given up: silent for 6.0 s, 5 s are allowed"
    )
    assert members.join("eu", 8.0) == 2
    assert members.expire(9.0) == ["us"], "8 is one second ago, 3 is six"


def test_a_heartbeat_that_arrives_late_does_not_turn_back_time():
    """An older `now` never shortens what an island has left."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.beat("us", 1, 10.0)
    members.beat("us", 1, 4.0)
    assert members.expire(14.0) == []


def test_a_reported_death_is_not_waited_for():
    """A reported death takes the island out at once and shows up in the next `expire`."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.fail("us", 1, "its actor died")
    assert members.live == []
    assert members.why("us") == "its actor died"
    assert members.expire(0.0) == ["us"]
    members.join("us", 1.0)
    members.fail("us", 1, "an old report")
    assert members.live == ["us"], "a report about an older generation changes nothing"


def test_an_idle_island_is_a_member_that_is_not_waited_for():
    """Out of data is not lost: it may wake up, and it can be lost while idle."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.join("eu", 0.0)
    members.leave("us", 1, idle=True)
    assert (members.live, members.idle, members.members) == (["eu"], ["us"], ["eu", "us"])
    assert members.fence("us", 1) is None
    members.wake("us", 1)
    assert members.live == ["eu", "us"]
    members.leave("us", 1, idle=True)
    members.beat("eu", 1, 9.0)
    assert members.expire(9.0) == ["us"]
    members.wake("us", 1)
    assert members.state("us") == "lost", "the fence holds for waking up too"


def test_leaving_in_order_is_not_a_loss():
    """An island that left is fenced with that word and may join again."""
    members = Membership(5.0)
    members.join("us", 0.0)
    members.leave("us", 1)
    assert members.expire(100.0) == []
    assert members.fence("us", 1) == "generation 1 of island us has left: ended in order"
    assert members.join("us", 101.0) == 2
    assert members.why("us") == ""
