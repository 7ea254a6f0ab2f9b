"""When an outer step happens and what goes into it.

One state machine for every fragment, with no clock, no tensors and no network: the synchronizer
feeds it the headers of contributions and asks whether a round closes. It also counts the inner
steps of the synchronous phase, where the contributions are gradients (a second `Rounds` of kind
"gradient", whose version is the number of the step). What merges does not depend on the order of arrival.

Every contribution has one fate: it merges, or is refused or dropped by name, or still waits. Once that is
decided, its repeats are answered in the same way and change nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic.base.ranges import RangeSet
from elastic.policy.open_round import OpenRound, Receipt
from elastic.policy.weighing import Contribution, Kind, Rules, scale_of, weights_of

DEFAULT_RULES = Rules()
ROUNDS_KEPT = 4
"""Closed rounds of a fragment that are remembered, to answer a message that comes again: these, or as many
as `max_staleness` if that is more. What was settled before is too late to be accepted again."""


@dataclass(frozen=True)
class Merge:
    """One outer step to carry out: `d = sum(w_i * delta_i)`, times `scale`, gives `version`."""

    fragment: int
    version: int
    """The new version."""
    contributions: tuple[Contribution, ...]
    """Sorted by island, generation and seq."""
    weights: tuple[float, ...]
    """By rule, times what staleness leaves: they sum to one at most, or are all zero."""
    scale: float
    """Share of the expected tokens that is merged (`partial: share`)."""
    dropped: tuple[str, ...] = ()
    """Ids of incomplete contributions that are too late for the next round: void now."""

    @property
    def moves(self) -> bool:
        """False if nobody trained: the version rises, parameters and momentum stay."""
        return any(self.weights)

    @property
    def tokens(self) -> int:
        """Tokens of all contributions."""
        return sum(contribution.tokens for contribution in self.contributions)


class Rounds:
    """The open rounds of all fragments.

    `versions`: where each fragment stands, after a restart. `kind`: what this instance takes. Times are
    those of the caller's own clock; islands state durations only. `live` may be any collection; where
    there are many islands give a set, a list is looked through for each contribution.
    """

    def __init__(
        self,
        fragments: int = 1,
        rules: Rules = DEFAULT_RULES,
        versions: Sequence[int] | None = None,
        kind: Kind = "delta",
    ) -> None:
        self._versions = list(versions) if versions is not None else [0] * fragments
        if len(self._versions) != fragments:
            raise ValueError(f"{fragments} fragments, but {len(self._versions)} versions")
        self._rules, self._kind = rules, kind
        self._floors = [0] * fragments
        """Deltas from earlier versions are refused, however late they may be."""
        self._open = [OpenRound(rules) for _ in range(fragments)]
        kept = max(ROUNDS_KEPT, rules.max_staleness)
        self._closed: list[deque[OpenRound]] = [deque(maxlen=kept) for _ in range(fragments)]
        self._tokens: list[dict[str, int]] = [{} for _ in range(fragments)]
        """By fragment: tokens of each island's last merged contribution; with a quorum only."""
        self._generations: dict[str, int] = {}

    # ------------------------------------------------------------------------------ reading

    @property
    def versions(self) -> list[int]:
        """The current version of every fragment."""
        return list(self._versions)

    def waiting_for(self, fragment: int, live: Collection[str]) -> list[str]:
        """Live islands whose answer the open round still lacks, sorted."""
        return sorted(set(live).difference(self._open[fragment].answered))

    def pending_ranges(self, island: str) -> RangeSet:
        """Data of the island's complete contributions that a coming merge will take in.

        With several fragments: what is complete in any of them.
        """
        headers = (header for opened in self._open for header in opened.complete.get(island, ()))
        return RangeSet(pair for header in headers for pair in header.ranges)

    def next_deadline(self) -> float | None:
        """When the first grace that is running ends, at which `close` may succeed; None if none is."""
        deadlines = (opened.deadline_s for opened in self._open)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # ----------------------------------------------------------------------------- changing

    def join(self, island: str, generation: int) -> tuple[str, ...]:
        """A new generation of the island begins: only it counts as the island's answer from now on.

        What an older one handed in completely still merges; the rest is void, its ids are returned.
        """
        self._generations[island] = max(generation, self._generations.get(island, 0))
        for opened in self._open:
            opened.take_back(island)
        return self.withdraw(island)

    def withdraw(self, island: str) -> tuple[str, ...]:
        """Drop the incomplete contributions of a lost island; returns their ids."""
        return tuple(header.id for opened in self._open for header in opened.take_incomplete(island))

    def forfeit(self, island: str, generation: int) -> tuple[str, ...]:
        """A generation goes on from other parameters: all it has in the open rounds is void; the ids.

        Where it has answered, nobody waits for it.
        """
        reason = f"generation {generation} of island {island} went on from other parameters"
        void: list[Contribution] = []
        for opened in self._open:
            void += [*opened.take_complete(island, generation, reason), *opened.take_incomplete(island)]
        return tuple(header.id for header in void)

    def advance(self, fragment: int, version: int) -> tuple[str, ...]:
        """The fragment got this version by other means (the end of a synchronous stretch).

        Whatever started from an older one is void; the ids of what waits in the open round are returned.
        """
        opened = self._open[fragment]
        void = [*opened.sorted_complete(), *(item.header for item in opened.sorted_incomplete())]
        self._versions[fragment] = self._floors[fragment] = version
        self._open[fragment] = OpenRound(self._rules)
        return tuple(header.id for header in void)

    def offer(
        self,
        contribution: Contribution,
        rank: int,
        live: Collection[str],
        problem: str = "",
        *,
        now: float = 0.0,
        slack_s: float = math.inf,
    ) -> Receipt:
        """Take the part of `rank`. `slack_s`: how long the island can wait for the merge from `now` on.

        `problem`: what the caller found wrong with the values of this part ("non-finite values in
        blocks.0.norm"); the whole contribution is refused then, and the island counts as having
        answered, so that the others do not wait for it.
        """
        header, island, fragment = contribution, contribution.island, contribution.fragment
        if reason := self._misfit(header, rank):
            return Receipt("refused", reason)
        opened, version = self._open[fragment], self._versions[fragment]
        # Only the open round can hold a contribution that starts from the current version.
        maybe = island in opened.complete or opened.void or header.base_version != version
        if maybe and (receipt := self._repeated(header)) is not None:
            return receipt
        if reason := self._untimely(header, live):
            return Receipt("refused", reason)
        receipt = opened.take(header, rank, problem)
        if receipt.status == "refused":
            opened.answer(island, math.inf, live, now)
        elif receipt.status == "accepted" and header.base_version == version:
            opened.answer(island, now + slack_s, live, now)
        return receipt

    def close(self, fragment: int, live: Collection[str], now: float = 0.0) -> Merge | None:
        """The merge that is due now, or None.

        It is due when every live island has answered, or when the quorum has and the grace for the rest
        is over. An island that is not live is not waited for; what it handed in completely while it was
        still merges.
        """
        opened = self._open[fragment]
        if not opened.is_due(live, now) or not (opened.complete or opened.refused):
            return None
        merged, version = opened.sorted_complete(), self._versions[fragment]
        self._versions[fragment] = version + 1
        weights, scale = weights_of(merged, version, self._rules), 1.0
        if self._kind == "delta" and self._rules.partial == "share":
            refused = {island: header.tokens for island, header in opened.refused.items()}
            scale = scale_of(opened.complete, live, refused, self._tokens[fragment])
        if self._rules.quorum is not None:
            self._tokens[fragment].update([(header.island, header.tokens) for header in merged])
        self._open[fragment], dropped = opened.following(self._oldest(fragment))
        opened.incomplete, opened.answered = {}, {}
        self._closed[fragment].append(opened)
        return Merge(
            fragment=fragment,
            version=version + 1,
            contributions=tuple(merged),
            weights=weights,
            scale=scale if any(weights) else 0.0,
            dropped=dropped,
        )

    # --------------------------------------------------------------------- whether it fits

    def _misfit(self, header: Contribution, rank: int) -> str:
        """Why this can never be a part of one of our rounds; empty if it can."""
        if header.kind != self._kind:
            return f"{header.id} is a {header.kind}, this phase takes a {self._kind}"
        if not 0 <= header.fragment < len(self._open):
            return f"{header.id}: there are {len(self._open)} fragments, no fragment {header.fragment}"
        if not 0 <= rank < header.parts:
            return f"{header.id} has {header.parts} parts, no rank {rank}"
        return ""

    def _repeated(self, header: Contribution) -> Receipt | None:
        """The answer if the contribution is complete, merged or void already."""
        rounds = (self._open[header.fragment], *reversed(self._closed[header.fragment]))
        receipts = (opened.receipt(header.island, header.turn) for opened in rounds)
        return next((receipt for receipt in receipts if receipt is not None), None)

    def _untimely(self, header: Contribution, live: Collection[str]) -> str:
        """Why this cannot be merged now; empty if it can."""
        current = self._generations.get(header.island, 0)
        if header.generation < current:
            return f"generation {header.generation} of island {header.island} is over, {current} is current"
        if header.island not in live:
            return f"{header.id}: island {header.island} is not live"
        base, version = header.base_version, self._versions[header.fragment]
        if base == version:
            return ""
        most = self._rules.max_staleness
        if self._oldest(header.fragment) <= base < version:
            return ""
        allowed = f"; at most {most} versions late is allowed" if most and base < version else ""
        return f"{header.id} starts from version {base}, {version} is current{allowed}"

    def _oldest(self, fragment: int) -> int:
        """The oldest version from which a contribution may start."""
        return max(self._versions[fragment] - self._rules.max_staleness, self._floors[fragment])
