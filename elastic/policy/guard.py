"""Which contributions are too large to be true, and which islands hand them in again and again.

A contribution is compared with the usual length of its fragment's deltas: the median of the last
accepted ones. Lengths change slowly, with the learning rate and the loss; a diverged island, a broken
accelerator or a wrong unit is off by orders of magnitude.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

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

    def judge(self, fragment: int, norm: float) -> str:
        """What is wrong with a contribution of this Euclidean length; empty if nothing is."""
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

    def is_quarantined(self, island: str) -> bool:
        """Whether the island may take part no longer."""
        return self._in_a_row.get(island, 0) >= self._repeats
