"""The messages: they pickle, and every carrier answers what the Protocol asks."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest

from elastic.base.ranges import RangeSet
from elastic.exchange import link
from elastic.exchange.link import FencedError, Hello, Link, Member, Part
from elastic.exchange.wire import Wire
from elastic.runtime.synchronizer import Synchronizer

pytestmark = pytest.mark.unit


def test_a_fence_survives_the_wire() -> None:
    """The error that ends an old incarnation keeps its reason, and whether there is a new one."""
    error = pickle.loads(pickle.dumps(FencedError("generation 1 of island us is over", True)))
    assert (str(error), error.superseded) == ("generation 1 of island us is over", True)


def test_messages_survive_the_wire() -> None:
    """What one side sends is what the other gets."""
    hello = Hello(
        "us", 2, "cpu", {"torch": "2.13"}, "ab", pending=(RangeSet([(0, 4)]),), rest=RangeSet([(8, 9)])
    )
    part = Part(Member("us", 1, 0, 1), "delta", 0, 1, 1, 0, 3, 64, 3, hello.pending[0], Wire("fp32", {}))
    for message in (hello, part):
        assert pickle.loads(pickle.dumps(message)) == message


def test_messages_are_frozen() -> None:
    """No side can change what it was sent."""
    kinds = [kind for _, kind in inspect.getmembers(link, dataclasses.is_dataclass)]
    assert len(kinds) >= 12
    assert all(kind.__dataclass_params__.frozen for kind in kinds)


def test_the_synchronizer_answers_every_call_of_the_protocol() -> None:
    """Names and parameters of `Link` are those of the synchronizer, which stands behind every carrier."""
    calls = [name for name in vars(Link) if not name.startswith("_")]
    assert len(calls) == 8
    for name in calls:
        wanted = list(inspect.signature(getattr(Link, name)).parameters)
        assert list(inspect.signature(getattr(Synchronizer, name)).parameters) == wanted
