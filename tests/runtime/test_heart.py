"""The heartbeat: it goes on beside a long step, and what it meets is not lost."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.exchange.link import Beat, Command, Member
from elastic.runtime.heart import Heart

pytestmark = pytest.mark.unit

BEAT = Beat(1, 2.0, 0.1, 1.0, 64, 10.0, 0.0, "outer")
US = Member("us", 1, 0, 1)


class Listening:
    """A link that notes beats and answers as told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Member, Beat]] = []
        self.answer = Command()
        self.error: Exception | None = None

    def beat(self, member: Member, beat: Beat) -> Command:
        self.heard.append((member, beat))
        if self.error is not None:
            raise self.error
        return self.answer


def _heart(link: Any, member: Any = lambda: US) -> Heart:
    heart = Heart(link, member, lambda: BEAT, every_s=0.005)
    heart.start()
    return heart


def test_it_beats_until_it_is_ended(lab: Any) -> None:
    """Beats come by themselves, with the newest figures, and stop with `end`."""
    link = Listening()
    heart = _heart(link)
    lab.until(lambda: len(link.heard) >= 3)
    heart.end()
    count = len(link.heard)
    assert set(link.heard) == {(US, BEAT)}
    assert not heart._thread.is_alive()
    assert len(link.heard) == count


def test_it_is_silent_before_the_island_has_joined(lab: Any) -> None:
    """Without a generation there is nobody to speak as."""
    link, members = Listening(), [None, None, US]
    heart = _heart(link, lambda: members.pop(0) if len(members) > 1 else US)
    lab.until(lambda: link.heard)
    heart.end()
    assert {member for member, _ in link.heard} == {US}


def test_it_passes_on_the_wish_to_stop(lab: Any) -> None:
    """The last command is there for the loop to read."""
    link = Listening()
    heart = _heart(link)
    assert not heart.stop_asked
    link.answer = Command(stop=True)
    lab.until(lambda: heart.stop_asked)
    heart.end()


def test_it_keeps_the_error_for_the_loop(lab: Any) -> None:
    """What a beat raised is raised again where the loop looks, each time, and no beat follows."""
    link = Listening()
    link.error = ConnectionError("the synchronizer is away")
    heart = _heart(link)
    lab.until(lambda: not heart._thread.is_alive())
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the synchronizer is away"):
            _ = heart.stop_asked
    assert len(link.heard) == 1
    heart.end()


def test_ending_one_that_never_began_is_nothing() -> None:
    """Ranks other than 0 have a heart that does not beat."""
    Heart(Listening(), lambda: US, lambda: BEAT).end()
