"""One validation of one version, spread over the islands in chunks of held-out sequences.

The result does not depend on who computed which chunk, or in which order: sums are added up by
chunk. The chunks of an island that is lost go to the others.
"""

from __future__ import annotations

import heapq
import math

Holder = tuple[str, int]
"""(island, generation)"""


class EvaluationQueue:
    """Sequences `0 .. total_sequences - 1` in chunks of `chunk`, to be judged at `version`."""

    def __init__(self, version: int, total_sequences: int, chunk: int) -> None:
        if total_sequences < 1 or chunk < 1:
            raise ValueError(f"{total_sequences} sequences in chunks of {chunk}: both must be at least 1")
        self.version, self.total, self.chunk = version, total_sequences, chunk
        self._free = list(range(0, total_sequences, chunk))  # a heap of starts; sorted is one
        self._held: dict[int, Holder] = {}
        self._sums: dict[int, tuple[float, int]] = {}

    def take(self, island: str, generation: int) -> tuple[int, int] | None:
        """The next chunk `(start, stop)` for this island; None if all are taken or done."""
        if not self._free:
            return None
        start = heapq.heappop(self._free)
        self._held[start] = island, generation
        return start, self._stop(start)

    def done(self, island: str, start: int, stop: int, loss_sum: float, tokens: int) -> bool:
        """Take the summed loss (nats) and the number of tokens of a chunk.

        False, and nothing changes, if the island does not hold that chunk: it was given to another
        meanwhile, or this is a repeated answer.
        """
        if self._held.get(start, ("", 0))[0] != island or stop != self._stop(start):
            return False
        del self._held[start]
        self._sums[start] = loss_sum, tokens
        return True

    def release(self, island: str, generation: int | None = None) -> None:
        """Put the island's unfinished chunks back (without `generation`: of all its generations)."""
        for start, holder in [*self._held.items()]:
            if holder[0] == island and generation in (None, holder[1]):
                del self._held[start]
                heapq.heappush(self._free, start)

    @property
    def finished(self) -> bool:
        """Whether every chunk is done."""
        return not self._free and not self._held

    @property
    def done_sequences(self) -> int:
        """Sequences judged so far."""
        return sum(self._stop(start) - start for start in self._sums)

    @property
    def tokens(self) -> int:
        """Tokens judged so far."""
        return sum(tokens for _, tokens in self._sums.values())

    @property
    def mean_loss(self) -> float:
        """Mean loss per token of what is done, in nats; NaN if a chunk's sum is not finite."""
        if not self.tokens:
            raise ValueError("no token is judged yet")
        sums = [self._sums[start][0] for start in sorted(self._sums)]
        if not all(map(math.isfinite, sums)):
            return math.nan
        return math.fsum(sums) / self.tokens

    def _stop(self, start: int) -> int:
        return min(start + self.chunk, self.total)
