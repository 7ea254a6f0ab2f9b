"""When an outer step happens, what goes into it, and with which weights.

One state machine for every fragment, with no clock, no tensors and no network: the synchronizer
feeds it the headers of contributions and asks whether a round closes. It also counts the inner
steps of the synchronous phase, where the contributions are gradients (a second `Rounds` of kind
"gradient", whose version is the number of the step). Nothing depends on the order of arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elastic.base.known import known
from elastic.base.ranges import RangeSet

Kind = Literal["delta", "gradient"]
Weights = Literal["tokens", "uniform", "tokens_rate"]
TURNS_KEPT = 64
"""Merged contributions of an island that are remembered, to know a repeated one."""
Turn = tuple[int, int]
"""(generation, seq): tells the contributions of one island to one fragment apart, and orders them."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a round closes and how its contributions are weighted (DESIGN section 4)."""

    weights: Weights = "tokens"
    """`tokens_rate`: tokens * tokens / steps (Decoupled DiLoCo, arXiv 2604.21428)."""
    quorum: int | None = None
    """Islands that must be in; None: all live ones. Never more than live."""
    grace_s: float = 0.0
    """Longest wait for the rest once the quorum is in."""
    staleness_discount: float = 0.0
    """Weight of a contribution s versions late: 1 / (1 + staleness_discount * s)."""
    max_staleness: int = 0
    """Later ones are refused."""
    partial: Literal["share", "full"] = "share"
    """When live islands are missing: scale the step by the share of the tokens, or not."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The header of what an island sends for one fragment; each of its `parts` ranks sends a part.

    All ranks send the same header. `tokens`, `steps` and `ranges` are those of the whole island
    since its last contribution to this fragment; all may be zero or empty.
    """

    island: str
    generation: int
    fragment: int
    seq: int
    """Rises by contribution within a generation; a repeated message has the same."""
    base_version: int
    """Version of the fragment from which the delta starts, or the step of the gradient."""
    from_step: int
    to_step: int
    tokens: int
    steps: int
    ranges: RangeSet
    parts: int
    kind: Kind = "delta"

    @property
    def id(self) -> str:
        """The name that records and refusals use."""
        return f"{self.island}/{self.generation}/{self.fragment}/{self.seq}"

    @property
    def turn(self) -> Turn:
        """Its place among the island's contributions to this fragment."""
        return self.generation, self.seq


@dataclass(frozen=True)
class Receipt:
    """The answer to one part. `dropped`: ids whose parts are void now; the holder frees them."""

    status: Literal["accepted", "waiting-parts", "duplicate", "refused"]
    reason: str = ""
    dropped: tuple[str, ...] = ()


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


@dataclass
class _Arriving:
    header: Contribution
    ranks: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.header.parts


@dataclass
class _Open:
    """The open round of one fragment."""

    arriving: dict[str, dict[Turn, _Arriving]] = field(default_factory=dict)
    """By island; contributions whose parts come in."""
    refused: dict[str, dict[Turn, tuple[Contribution, str]]] = field(default_factory=dict)
    """By island; contributions refused for their values, and why."""
    answered: set[str] = field(default_factory=set)
    """Islands that have answered in their current generation: with a complete contribution to this round
    (a late one to an earlier round is no answer), or with one that was refused for its values."""
    patience_s: float = math.inf
    """The earliest time at which one of those that wait must adopt."""
    full_s: float | None = None
    """When the quorum was in."""

    def headers(self, *, complete: bool) -> list[Contribution]:
        """Headers of complete or of incomplete ones, sorted by island, generation and seq."""
        items = (item for _, turns in sorted(self.arriving.items()) for _, item in sorted(turns.items()))
        return [item.header for item in items if item.complete == complete]

    def drop_incomplete(self, island: str, before: Turn | None = None) -> tuple[str, ...]:
        """Forget incomplete contributions of an island (those older than `before`); their ids."""
        turns = self.arriving.get(island, {})
        void = [turn for turn, item in turns.items() if not item.complete and (not before or turn < before)]
        return tuple(turns.pop(turn).header.id for turn in void)


class Rounds:
    """The open rounds of all fragments.

    `versions`: where each fragment stands, after a restart. `kind`: what this instance takes. Times are
    those of the caller's own clock; islands state durations only.
    """

    def __init__(
        self,
        fragments: int = 1,
        rules: Rules = Rules(),
        versions: Sequence[int] | None = None,
        kind: Kind = "delta",
    ) -> None:
        self._versions = list(versions) if versions is not None else [0] * fragments
        if len(self._versions) != fragments:
            raise ValueError(f"{fragments} fragments, but {len(self._versions)} versions")
        self._rules, self._kind = rules, kind
        self._open = [_Open() for _ in range(fragments)]
        self._merged: list[dict[str, deque[Turn]]] = [{} for _ in range(fragments)]
        self._tokens: list[dict[str, int]] = [{} for _ in range(fragments)]
        """By fragment: tokens of each island's newest merged contribution."""
        self._generations: dict[str, int] = {}

    # ------------------------------------------------------------------------------ reading

    @property
    def versions(self) -> list[int]:
        """The current version of every fragment."""
        return list(self._versions)

    def waiting_for(self, fragment: int, live: Collection[str]) -> list[str]:
        """Live islands whose answer the open round still lacks, sorted."""
        return sorted(set(live) - self._open[fragment].answered)

    def pending_ranges(self, island: str) -> RangeSet:
        """Data of the island's complete contributions that a coming merge will take in.

        With several fragments: what is complete in any of them.
        """
        items = (item for opened in self._open for item in opened.arriving.get(island, {}).values())
        return RangeSet(pair for item in items if item.complete for pair in item.header.ranges)

    def next_deadline(self) -> float | None:
        """When the first grace that is running ends; None if none is."""
        running = [opened for opened in self._open if opened.full_s is not None]
        return min((self._deadline(opened) for opened in running), default=None)

    # ----------------------------------------------------------------------------- changing

    def join(self, island: str, generation: int) -> tuple[str, ...]:
        """A new generation of the island begins: only it counts as the island's answer from now on.

        What an older one handed in completely still merges; the rest is void, its ids are returned.
        """
        self._generations[island] = max(generation, self._generations.get(island, 0))
        for opened in self._open:
            opened.answered.discard(island)
        return self.withdraw(island)

    def withdraw(self, island: str) -> tuple[str, ...]:
        """Drop the incomplete contributions of a lost island; returns their ids."""
        return tuple(name for opened in self._open for name in opened.drop_incomplete(island))

    def advance(self, fragment: int, version: int) -> tuple[str, ...]:
        """The fragment got this version by other means (the end of a synchronous stretch).

        Whatever waits in its open round started from an older one and is void; its ids are returned.
        """
        headers = self._open[fragment].headers
        void = tuple(header.id for header in [*headers(complete=True), *headers(complete=False)])
        self._versions[fragment], self._open[fragment] = version, _Open()
        return void

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
        header = contribution
        reason = self._misfit(header, rank)
        if reason:
            return Receipt("refused", reason)
        opened, turn = self._open[header.fragment], header.turn
        if turn in self._merged[header.fragment].get(header.island, ()):
            return Receipt("duplicate")
        refused = opened.refused.get(header.island, {}).get(turn)
        if refused:
            return Receipt("refused", refused[1])
        reason = self._untimely(header, live)
        if reason:
            return Receipt("refused", reason)
        turns = opened.arriving.setdefault(header.island, {})
        item = turns.get(turn) or _Arriving(header)
        if not problem and item.header != header:
            problem = "its parts disagree about the header"
        if problem:
            reason = f"contribution {header.id}, rank {rank}: {problem}"
            opened.refused.setdefault(header.island, {})[turn] = header, reason
            opened.answered.add(header.island)
            return Receipt("refused", reason, (header.id,) if turns.pop(turn, None) else ())
        if rank in item.ranks:
            return Receipt("duplicate")
        turns[turn] = item
        item.ranks.add(rank)
        if not item.complete:
            return Receipt("waiting-parts")
        if header.base_version == self._versions[header.fragment]:
            opened.answered.add(header.island)
            opened.patience_s = min(opened.patience_s, now + slack_s)
            quorum = self._rules.quorum
            if quorum is not None and len(opened.answered) >= min(quorum, len(live)):
                opened.full_s = now if opened.full_s is None else opened.full_s
        return Receipt("accepted", dropped=opened.drop_incomplete(header.island, before=turn))

    def close(self, fragment: int, live: Collection[str], now: float = 0.0) -> Merge | None:
        """The merge that is due now, or None.

        It is due when every live island has answered, or when the quorum has and the grace for the rest
        is over. An island that is not live is not waited for; what it handed in completely still merges.
        """
        opened = self._open[fragment]
        if not self._is_due(opened, live, now):
            return None
        complete = opened.headers(complete=True)
        if not complete and not opened.refused:
            return None
        version, self._versions[fragment] = self._versions[fragment], self._versions[fragment] + 1
        for header in complete:
            turns = self._merged[fragment].setdefault(header.island, deque(maxlen=TURNS_KEPT))
            turns.append(header.turn)
        scale = self._scale(fragment, complete, live)
        for header in complete:
            self._tokens[fragment][header.island] = header.tokens
        self._open[fragment], dropped = self._carried(fragment)
        weights = self._weights(complete, version)
        return Merge(
            fragment=fragment,
            version=version + 1,
            contributions=tuple(complete),
            weights=weights,
            scale=scale if any(weights) else 0.0,
            dropped=dropped,
        )

    # ------------------------------------------------------------------------------- inside

    def _misfit(self, header: Contribution, rank: int) -> str:
        """Why this can never be a part of one of our rounds; empty if it can."""
        if header.kind != self._kind:
            return f"{header.id} is a {header.kind}, this phase takes a {self._kind}"
        if not 0 <= header.fragment < len(self._open):
            return f"{header.id}: there are {len(self._open)} fragments, no fragment {header.fragment}"
        if not 0 <= rank < header.parts:
            return f"{header.id} has {header.parts} parts, no rank {rank}"
        return ""

    def _untimely(self, header: Contribution, live: Collection[str]) -> str:
        """Why this cannot be merged now; empty if it can."""
        current = self._generations.get(header.island, 0)
        if header.generation < current:
            return f"generation {header.generation} of island {header.island} is over, {current} is current"
        if header.island not in live:
            return f"{header.id}: island {header.island} is not live"
        version = self._versions[header.fragment]
        late, most = version - header.base_version, self._rules.max_staleness
        if late < 0 or late > most:
            allowed = f"; at most {most} versions late is allowed" if most and late > 0 else ""
            return f"{header.id} starts from version {header.base_version}, {version} is current{allowed}"
        return ""

    def _is_due(self, opened: _Open, live: Collection[str], now: float) -> bool:
        quorum = self._rules.quorum
        if len(opened.answered) < (len(live) if quorum is None else min(quorum, len(live))):
            return False
        missing = sum(name not in opened.answered for name in live)
        if not missing:
            return True
        if quorum is None or len(live) - missing < min(quorum, len(live)):
            opened.full_s = None
            return False
        opened.full_s = now if opened.full_s is None else opened.full_s
        return now >= self._deadline(opened)

    def _deadline(self, opened: _Open) -> float:
        """The end of a grace that is running: never beyond what those that wait can spare."""
        return min(known(opened.full_s) + self._rules.grace_s, max(opened.patience_s, known(opened.full_s)))

    def _carried(self, fragment: int) -> tuple[_Open, tuple[str, ...]]:
        """The next round, with the incomplete contributions that may still come; ids of the others."""
        following, void = _Open(), []
        for island, turns in self._open[fragment].arriving.items():
            for turn, item in turns.items():
                if item.complete:
                    continue
                if self._versions[fragment] - item.header.base_version > self._rules.max_staleness:
                    void.append(item.header)
                else:
                    following.arriving.setdefault(island, {})[turn] = item
        void.sort(key=lambda header: (header.island, header.turn))
        return following, tuple(header.id for header in void)

    def _scale(self, fragment: int, merged: list[Contribution], live: Collection[str]) -> float:
        """Merged tokens over those expected of the live islands; a mean gradient is never scaled.

        A live island that is not merged counts with the tokens that it announced if its values were
        refused, else with those of its last contribution to the fragment, else with the mean of the merged.
        """
        if self._kind == "gradient" or self._rules.partial == "full":
            return 1.0
        opened = self._open[fragment]
        there = {header.island for header in merged}
        tokens = sum(header.tokens for header in merged)
        usual = tokens / len(there) if there else 0.0
        expected = float(tokens)
        for island in {*live, *opened.refused} - there:
            turns = opened.refused.get(island)
            known_tokens = self._tokens[fragment].get(island, usual)
            expected += turns[max(turns)][0].tokens if turns else known_tokens
        return tokens / expected if expected else 1.0

    def _weights(self, headers: list[Contribution], version: int) -> tuple[float, ...]:
        """Weights at `version`; an island that took no step weighs nothing under any rule."""
        raw = [_raw_weight(header, self._rules.weights) for header in headers]
        total = sum(raw)
        if not total:
            return tuple(0.0 for _ in raw)
        discount = self._rules.staleness_discount
        late = [version - header.base_version for header in headers]
        return tuple(weight / total / (1.0 + discount * s) for weight, s in zip(raw, late, strict=True))


def _raw_weight(header: Contribution, rule: Weights) -> float:
    if rule == "uniform":
        return float(header.steps > 0)
    if rule == "tokens_rate":
        return header.tokens * header.tokens / header.steps if header.steps else 0.0
    return header.tokens
