"""Which islands take part: generations, heartbeats, and who is fenced off.

A state machine without a clock: `now` is the caller's own monotonic time in seconds. An island is

    live   takes part in outer steps        idle  in order, but out of data for now
    lost   given up: silent or dead         left  ended in order

Each join gives the island a new generation, and messages of any other are refused (fencing), so a
frozen or cut-off incarnation that wakes up again can change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["live", "idle", "lost", "left"]


@dataclass
class _Member:
    generation: int
    state: State
    seen_s: float
    why: str = ""


class Membership:
    """The islands of a run and their states.

    `timeout_s`: an island that is silent for longer is lost (`outer.island_timeout_s`).
    `generations`: the last generation of each island in earlier lives of the run.
    """

    def __init__(self, timeout_s: float, generations: Mapping[str, int] | None = None) -> None:
        self.timeout_s = timeout_s
        self._generations = dict(generations or {})
        self._members: dict[str, _Member] = {}
        self._lost: list[str] = []

    # ------------------------------------------------------------------------------ reading

    @property
    def live(self) -> list[str]:
        """Islands that take part in outer steps, sorted."""
        return self._in("live")

    @property
    def idle(self) -> list[str]:
        """Islands that wait for data, sorted."""
        return self._in("idle")

    @property
    def members(self) -> list[str]:
        """Live and idle islands, sorted: those among which the ledger deals its blocks."""
        return self._in("live", "idle")

    @property
    def generations(self) -> dict[str, int]:
        """The newest generation of every island ever seen; part of every record."""
        return dict(self._generations)

    def state(self, island: str) -> State | None:
        """The island's state; None if it has not joined in this life of the run."""
        member = self._members.get(island)
        return member.state if member else None

    def fence(self, island: str, generation: int) -> str | None:
        """None if messages of this generation are welcome, else the reason why not."""
        current = self._generations.get(island, 0)
        if generation < current:
            return f"generation {generation} of island {island} is over, {current} is current"
        member = self._members.get(island)
        if member is None or generation > current:
            return f"generation {generation} of island {island} has not joined"
        if member.state in ("lost", "left"):
            how = "was given up" if member.state == "lost" else "has left"
            return f"generation {generation} of island {island} {how}: {member.why}"
        return None

    # ----------------------------------------------------------------------------- changing

    def join(self, island: str, now: float) -> int:
        """A new incarnation of the island; returns its generation.

        The former generation, if any, is over from here on: the caller gives its leases back.
        """
        generation = self._generations.get(island, 0) + 1
        self._generations[island] = generation
        self._members[island] = _Member(generation, "live", now)
        return generation

    def beat(self, island: str, generation: int, now: float) -> str | None:
        """A sign of life. Returns None, or the reason why this generation is fenced off."""
        reason = self.fence(island, generation)
        if reason is None:
            member = self._members[island]
            member.seen_s = max(member.seen_s, now)
        return reason

    def leave(self, island: str, generation: int, *, idle: bool = False, why: str = "ended in order") -> None:
        """The island takes part no longer: out of data for now (`idle`), or for good.

        An idle island goes on beating its heart. A fenced generation changes nothing.
        """
        if self.fence(island, generation) is None:
            member = self._members[island]
            member.state, member.why = ("idle", "") if idle else ("left", why)

    def wake(self, island: str, generation: int) -> None:
        """There is data again: an idle island takes part again."""
        if self.fence(island, generation) is None:
            self._members[island].state = "live"

    def fail(self, island: str, generation: int, why: str) -> None:
        """The island is reported dead: lost at once, without waiting for its silence."""
        if self.fence(island, generation) is None:
            self._lose(island, why)

    def expire(self, now: float) -> list[str]:
        """The islands lost since the last call: reported dead, or silent for longer than allowed."""
        for island in self.members:
            silent_s = now - self._members[island].seen_s
            if silent_s > self.timeout_s:
                self._lose(island, f"silent for {silent_s:.1f} s, {self.timeout_s:g} s are allowed")
        lost, self._lost = sorted(set(self._lost)), []
        return lost

    def why(self, island: str) -> str:
        """Why the island was lost or left; empty otherwise."""
        member = self._members.get(island)
        return member.why if member else ""

    # ------------------------------------------------------------------------------- inside

    def _in(self, *states: State) -> list[str]:
        return sorted(name for name, member in self._members.items() if member.state in states)

    def _lose(self, island: str, why: str) -> None:
        member = self._members[island]
        member.state, member.why = "lost", why
        self._lost.append(island)
