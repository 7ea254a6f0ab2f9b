"""The open round of one fragment: what is in, who has answered, and when it is due.

Every contribution has one fate: it merges, or is refused or dropped by name, or still waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from elastic.base.known import known
from elastic.policy.weighing import Contribution, Rules, Turn


@dataclass(frozen=True)
class Receipt:
    """The answer to one part. `dropped`: ids whose parts are void now; the holder frees them."""

    status: Literal["accepted", "waiting-parts", "duplicate", "refused"]
    reason: str = ""
    dropped: tuple[str, ...] = ()


ACCEPTED, WAITING, DUPLICATE = Receipt("accepted"), Receipt("waiting-parts"), Receipt("duplicate")


@dataclass(slots=True)
class _Arriving:
    header: Contribution
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class OpenRound:
    """The open round of one fragment. What is kept is by island; times are those of the caller's clock."""

    rules: Rules
    complete: dict[str, list[Contribution]] = field(default_factory=dict)
    incomplete: dict[str, dict[Turn, _Arriving]] = field(default_factory=dict)
    """Never holds an island without any."""
    refused: dict[str, Contribution] = field(default_factory=dict)
    """The newest one that was refused for its values."""
    void: dict[tuple[str, Turn], str] = field(default_factory=dict)
    """By island and turn: why a contribution was refused for its values, or dropped."""
    answered: dict[str, float] = field(default_factory=dict)
    """When the island must adopt (known with a quorum only). These have answered in their current
    generation: with a complete contribution to this round (a late one to an earlier round is no answer), or
    with one that was refused for its values: such an island waits for the next version."""
    patience_s: float = math.inf
    """The earliest of these times, or that of an island that is gone by now."""
    full_s: float | None = None
    """When the quorum was in; None before."""
    deadline_s: float | None = None
    """The end of the grace that is running; None if none is."""

    def receipt(self, island: str, turn: Turn) -> Receipt | None:
        """The answer to a part of a contribution that is complete or void already; None for others."""
        for header in self.complete.get(island, ()):
            if header.turn == turn:
                return DUPLICATE
        reason = self.void.get((island, turn)) if self.void else None
        return None if reason is None else Receipt("refused", reason)

    def sorted_complete(self) -> list[Contribution]:
        """Complete ones, sorted by island, generation and seq."""
        headers = list(chain.from_iterable(map(self.complete.__getitem__, sorted(self.complete))))
        if len(headers) > len(self.complete):
            headers.sort(key=lambda header: (header.island, header.turn))
        return headers

    def sorted_incomplete(self) -> Iterator[_Arriving]:
        """Incomplete ones, sorted by island, generation and seq."""
        return (item for _, turns in sorted(self.incomplete.items()) for _, item in sorted(turns.items()))

    # ----------------------------------------------------------------------- what is taken

    def take(self, header: Contribution, rank: int, problem: str) -> Receipt:
        """Take a part; `problem`: what is wrong with its values."""
        superseding = header.island in self.incomplete
        if problem or superseding or header.parts > 1:
            receipt = self._take_part(header, rank, problem)
            if receipt is not ACCEPTED:
                return receipt
        self.complete.setdefault(header.island, []).append(header)
        return self._supersede(header) if superseding else ACCEPTED

    def take_incomplete(self, island: str, before: Turn | None = None) -> list[Contribution]:
        """Forget incomplete contributions of an island (those older than `before`), and name them."""
        turns = self.incomplete.pop(island, {})
        kept = {turn: item for turn, item in turns.items() if before is not None and turn > before}
        if kept:
            self.incomplete[island] = kept
        return [item.header for turn, item in turns.items() if turn not in kept]

    def take_complete(self, island: str, generation: int, reason: str) -> list[Contribution]:
        """Forget complete ones of one generation of an island, and name them; repeats are refused."""
        headers = self.complete.pop(island, [])
        kept = [header for header in headers if header.generation != generation]
        if kept:
            self.complete[island] = kept
        taken = [header for header in headers if header.generation == generation]
        self.void |= {(island, header.turn): reason for header in taken}
        return taken

    def following(self, oldest: int) -> tuple[OpenRound, tuple[str, ...]]:
        """The next round, with the incomplete contributions that may still come: those that start from
        version `oldest` or later. Also the ids of the others."""
        following, void = OpenRound(self.rules), []
        for item in self.sorted_incomplete():
            header = item.header
            if header.base_version < oldest:
                void.append(header.id)
            else:
                following.incomplete.setdefault(header.island, {})[header.turn] = item
        return following, tuple(void)

    def _take_part(self, header: Contribution, rank: int, problem: str) -> Receipt:
        """Take one part among several; accepted if the contribution is whole by it."""
        turns, turn = self.incomplete.get(header.island, {}), header.turn
        item = turns.get(turn)
        if item is not None and not problem and item.header != header:
            problem = "its parts disagree about the header"
        if problem:
            reason = f"contribution {header.id}, rank {rank}: {problem}"
            self._forget(header)
            self.void[header.island, turn] = reason
            before = self.refused.get(header.island)
            if before is None or before.turn < turn:
                self.refused[header.island] = header
            return Receipt("refused", reason, (header.id,) if item is not None else ())
        if item is None:
            item = _Arriving(header)
        if rank in item.ranks:
            return DUPLICATE
        item.ranks.add(rank)
        if len(item.ranks) < header.parts:
            self.incomplete.setdefault(header.island, {})[turn] = item
            return WAITING
        self._forget(header)
        return ACCEPTED

    def _forget(self, header: Contribution) -> None:
        """Its parts wait for each other no longer."""
        turns = self.incomplete.get(header.island, {})
        turns.pop(header.turn, None)
        if not turns:
            self.incomplete.pop(header.island, None)

    def _supersede(self, header: Contribution) -> Receipt:
        """Accept one, and drop older ones of its island whose missing parts were lost on the way."""
        void = self.take_incomplete(header.island, before=header.turn)
        for older in void:
            reason = f"{older.id} was dropped, incomplete, when {header.id} was complete"
            self.void[older.island, older.turn] = reason
        return Receipt("accepted", dropped=tuple(older.id for older in void))

    # --------------------------------------------------------------------- when it closes

    def answer(self, island: str, adopts_s: float, live: Collection[str], now: float) -> None:
        """The island has answered and must adopt at `adopts_s`: perhaps the quorum is in by that."""
        if self.rules.quorum is None:
            self.answered[island] = math.inf
            return
        self.answered[island] = min(adopts_s, self.answered.get(island, math.inf))
        sooner = adopts_s < self.patience_s
        if sooner:
            self.patience_s = adopts_s
        if self.full_s is None and self._has_quorum(live):
            self._begin_grace(now)
        elif sooner and self.full_s is not None:
            self._begin_grace(self.full_s)

    def take_back(self, island: str) -> None:
        """What the island answered does not count any more."""
        if self.answered.pop(island, None) is not None and len(self.answered) < (self.rules.quorum or 0):
            self._end_grace()

    def is_due(self, live: Collection[str], now: float) -> bool:
        """Whether enough live islands have answered, and the grace for the others is over."""
        # Islands are looked through only when the count allows it, which is seldom more than once a round.
        if len(self.answered) >= len(live) and all(map(self.answered.__contains__, live)):
            return True
        if self.rules.quorum is None or (self.deadline_s is not None and now < self.deadline_s):
            return False
        if not self._has_quorum(live):
            self._end_grace()
            return False
        # Islands that are gone wait no longer.
        self.patience_s = min(self.answered[name] for name in live if name in self.answered)
        return now >= self._begin_grace(now if self.full_s is None else self.full_s)

    def _begin_grace(self, full_s: float) -> float:
        """The quorum was in at `full_s`. The grace never goes beyond what those that wait can spare."""
        self.full_s = full_s
        self.deadline_s = min(full_s + self.rules.grace_s, max(self.patience_s, full_s))
        return self.deadline_s

    def _end_grace(self) -> None:
        self.full_s = self.deadline_s = None

    def _has_quorum(self, live: Collection[str]) -> bool:
        """Whether enough live islands have answered for a grace to begin."""
        needed = min(known(self.rules.quorum), len(live))
        return len(self.answered) >= needed and sum(map(self.answered.__contains__, live)) >= needed
