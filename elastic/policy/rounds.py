"""When an outer step happens, what goes into it, and with which weights.

One state machine for every fragment, with no clock, no tensors and no network: the synchronizer
feeds it the headers of contributions and asks whether a round closes. It also counts the inner
steps of the synchronous phase, where the contributions are gradients (a second `Rounds` of kind
"gradient", whose version is the number of the step). Nothing depends on the order of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from elastic.base.ranges import RangeSet

Kind = Literal["delta", "gradient"]
Turn = tuple[int, int]
"""(generation, seq): tells the contributions of one island to one fragment apart, and orders them."""


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
    """Normalised: they sum to one, or are all zero."""
    scale: float
    """Share of the expected tokens that is merged (`partial: share`)."""
    dropped: tuple[str, ...] = ()
    """Ids of incomplete contributions that started from the version before: void now."""

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
    """Islands that have answered in their current generation: complete, or refused for its values."""

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
    """The open rounds of all fragments. The quorum is: all live islands.

    `versions`: where each fragment stands, after a restart. `kind`: what this instance takes.
    """

    def __init__(
        self,
        fragments: int = 1,
        weights: Literal["tokens", "uniform"] = "tokens",
        versions: Sequence[int] | None = None,
        kind: Kind = "delta",
    ) -> None:
        self._versions = list(versions) if versions is not None else [0] * fragments
        if len(self._versions) != fragments:
            raise ValueError(f"{fragments} fragments, but {len(self._versions)} versions")
        self._weights, self._kind = weights, kind
        self._open = [_Open() for _ in range(fragments)]
        self._merged: list[dict[str, Turn]] = [{} for _ in range(fragments)]
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
        self, contribution: Contribution, rank: int, live: Collection[str], problem: str = ""
    ) -> Receipt:
        """Take the part of `rank`.

        `problem`: what the caller found wrong with the values of this part ("non-finite values in
        blocks.0.norm"); the whole contribution is refused then, and the island counts as having
        answered, so that the others do not wait for it.
        """
        header = contribution
        reason = self._misfit(header, rank)
        if reason:
            return Receipt("refused", reason)
        opened, turn = self._open[header.fragment], header.turn
        if self._merged[header.fragment].get(header.island, (0, -1)) >= turn:
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
        opened.answered.add(header.island)
        return Receipt("accepted", dropped=opened.drop_incomplete(header.island, before=turn))

    def close(self, fragment: int, live: Collection[str]) -> Merge | None:
        """The merge that is due now, or None while a live island has not answered.

        An island that is not live is not waited for; what it handed in completely still merges.
        """
        opened = self._open[fragment]
        if len(opened.answered) < len(live) or any(name not in opened.answered for name in live):
            return None
        complete = opened.headers(complete=True)
        if not complete and not opened.refused:
            return None
        self._versions[fragment] += 1
        for header in complete:
            self._merged[fragment][header.island] = header.turn
        merged = {header.island for header in complete}
        left_out = [turns[max(turns)][0] for name, turns in opened.refused.items() if name not in merged]
        self._open[fragment] = _Open()
        weights = _weights(complete, self._weights)
        return Merge(
            fragment=fragment,
            version=self._versions[fragment],
            contributions=tuple(complete),
            weights=weights,
            scale=self._scale(complete, left_out) if any(weights) else 0.0,
            dropped=tuple(header.id for header in opened.headers(complete=False)),
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
        if header.base_version != version:
            return f"{header.id} starts from version {header.base_version}, {version} is current"
        return ""

    def _scale(self, merged: list[Contribution], left_out: list[Contribution]) -> float:
        """Merged tokens over those expected of the live islands; a mean gradient is never scaled.

        With quorum all every live island is merged or was refused for its values, so only such a
        refusal makes the scale less than one.
        """
        if self._kind == "gradient":
            return 1.0
        tokens = sum(header.tokens for header in merged)
        return tokens / (tokens + sum(header.tokens for header in left_out))


def _weights(headers: list[Contribution], rule: Literal["tokens", "uniform"]) -> tuple[float, ...]:
    """Normalised weights; an island that took no step weighs nothing under either rule."""
    raw = [header.tokens if rule == "tokens" else int(header.steps > 0) for header in headers]
    total = sum(raw)
    return tuple(weight / total if total else 0.0 for weight in raw)
