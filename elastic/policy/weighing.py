"""What islands hand in to a round, and how much of it counts.

The outer step of a fragment is `scale * sum(weight_i * delta_i)` with

    weight_i = w_i * g(s_i) / sum(w),   g(s) = 1 / (1 + staleness_discount * s),
    scale    = tokens merged / tokens expected of the live islands   (`partial: share`),

so that a late contribution really shrinks the step, and M islands merged one by one do not move M times
as far as M islands merged together. Staleness s is the version that is current when the round closes
minus the version from which the contribution started.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.base.ranges import RangeSet

Kind = Literal["delta", "gradient"]
Weights = Literal["tokens", "uniform", "tokens_rate"]
Turn = tuple[int, int]
"""(generation, seq): tells the contributions of one island to one fragment apart, and orders them."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a round closes and how its contributions are weighted."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
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


def weights_of(headers: Sequence[Contribution], version: int, rules: Rules) -> tuple[float, ...]:
    """The weights of contributions that merge while `version` is current: they sum to one at most.

    An island that took no step weighs nothing under any rule; all are zero if nobody took one.
    """
    if rules.weights == "tokens":
        raw: list[float] = [header.tokens for header in headers]
    elif rules.weights == "uniform":
        raw = [float(header.steps > 0) for header in headers]
    else:
        raw = [header.tokens * header.tokens / header.steps if header.steps else 0.0 for header in headers]
    total = sum(raw) or 1.0
    discount = rules.staleness_discount
    if not discount:
        return tuple([weight / total for weight in raw])
    late = [version - header.base_version for header in headers]
    return tuple([weight / total / (1.0 + discount * s) for weight, s in zip(raw, late, strict=True)])


def scale_of(
    merged: Mapping[str, Sequence[Contribution]],
    live: Collection[str],
    refused: Mapping[str, int],
    usual: Mapping[str, int],
) -> float:
    """Merged tokens (`merged`: by island) over the tokens expected: those, and for each island without any

    * if its values were refused (`refused`: tokens by island; it need not be live any more): what it
      announced;
    * else, if it is live: the tokens of its last merged contribution to the fragment (`usual`), or the
      mean of the merged contributions if it has none.

    One if nothing is expected. Counts are summed as integers, so the order of `live` does not matter.
    """
    if not refused and all(map(merged.__contains__, live)):
        return 1.0
    given = [header.tokens for headers in merged.values() for header in headers]
    tokens = sum(given)
    expected = tokens + sum([announced for island, announced in refused.items() if island not in merged])
    missing = [island for island in live if island not in merged and island not in refused]
    strangers = [island for island in missing if island not in usual]
    expected += sum([usual[island] for island in missing if island in usual])
    mean = tokens / len(given) if given else 0.0
    return tokens / (expected + len(strangers) * mean) if expected else 1.0
