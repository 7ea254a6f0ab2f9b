"""Which contributions are too large to be true, and which islands hand them in again and again.

A contribution is compared with the usual length of its fragment's deltas: the median of the last
accepted ones. Lengths change slowly, with the learning rate and the loss; a diverged island, a broken
accelerator or a wrong unit is off by orders of magnitude.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

KEPT = 32
"""Accepted lengths that are remembered, by fragment."""
NEEDED = 4
"""Accepted lengths before anything is judged."""


class Guard:
    """Judges the length of contributions; `limit`: how many times the usual one is refused.

    After `repeats` refusals in a row an island is quarantined: it takes part no longer.
    """

    def __init__(self, limit: float = 100.0, repeats: int = 3) -> None:
        self._limit, self._repeats = limit, repeats
        self._usual: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._in_a_row: dict[str, int] = {}
        self._refusals: Counter[str] = Counter()

    @property
    def refusals(self) -> dict[str, int]:
        """How many contributions of each island were refused for their values, in all."""
        return dict(self._refusals)

    def judge(self, fragment: int, norm: float) -> str:
        """What is wrong with a contribution of this Euclidean length; empty if nothing is."""
        if not math.isfinite(norm):
            return f"its length is {norm}"
        lengths = self._usual[fragment]
        if len(lengths) < NEEDED:
            return ""
        usual = median(lengths)
        if norm <= self._limit * usual:
            return ""
        return (
            f"its length {norm:.3g} is {norm / usual:.0f} times the usual {usual:.3g}; "
            f"outer.norm_limit is {self._limit:g}"
        )

    def accepted(self, island: str, fragment: int, norm: float) -> None:
        """A contribution was taken in; one without any progress says nothing about lengths."""
        self._in_a_row.pop(island, None)
        if norm > 0.0:
            self._usual[fragment].append(norm)

    def refused(self, island: str) -> None:
        """A contribution of the island was refused for its values."""
        self._in_a_row[island] = self._in_a_row.get(island, 0) + 1
        self._refusals[island] += 1

    def is_quarantined(self, island: str) -> bool:
        """Whether the island may take part no longer."""
        return self._in_a_row.get(island, 0) >= self._repeats

    def release(self, island: str) -> None:
        """The island was looked after: it may take part again, and is quarantined after as many refusals."""
        self._in_a_row.pop(island, None)

    def to_json(self) -> dict[str, Any]:
        """What was seen so far; the settings are not part of it."""
        lengths = {str(fragment): list(kept) for fragment, kept in sorted(self._usual.items())}
        return {"lengths": lengths, "in_a_row": dict(self._in_a_row), "refusals": self.refusals}

    def restore(self, value: Mapping[str, Any]) -> None:
        """Go on from what `to_json` gave. Raises KeyError or ValueError on anything else."""
        lengths, in_a_row, refusals = value["lengths"], value["in_a_row"], value["refusals"]
        self._usual.clear()
        for fragment, kept in lengths.items():
            self._usual[int(fragment)].extend(map(float, kept))
        self._in_a_row, self._refusals = dict(in_a_row), Counter(refusals)
