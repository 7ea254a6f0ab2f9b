"""The two ways an island's steps reach the other islands, behind one small interface.

`SynchronousPhase` exchanges the gradient of every inner step (the baseline, and the warm-up).
`OuterPhase` takes inner steps alone and exchanges the deltas of fragments. The loop holds one of them
at a time and never asks which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from elastic.exchange.link import Packet
from elastic.runtime.progress import Progress

if TYPE_CHECKING:
    from elastic.runtime.island_rank import IslandRank

POLL_S = 1.0


@dataclass(frozen=True)
class Stepped:
    """What one inner step did."""

    loss_sum: float
    """Training loss summed over this rank's share of the batch, nats."""
    own_tokens: int
    """Tokens of that share."""
    tokens: int
    """Tokens of the island's whole batch."""
    grad_norm: float
    """Global norm before clipping."""


class Phase(Protocol):
    """How inner steps reach the others. A Protocol so that the loop has no mode flags."""

    name: str
    versions: list[int]
    """Of each fragment, adopted."""

    @property
    def version(self) -> int:
        """That every fragment has reached."""

    @property
    def steps_since(self) -> int:
        """Own inner steps that the adopted versions have not taken in."""

    def take_step(self, batch: np.ndarray, positions: tuple[int, int], lr: float) -> Stepped:
        """One inner step on `batch` [B, T + 1], which are these positions of the order."""

    def is_due(self) -> bool:
        """Whether the islands must talk now."""

    def may_stop(self) -> bool:
        """Whether the island could save itself now and later go on from there."""

    def synchronise(self) -> Iterator[Packet]:
        """Hand in and adopt what is due now; each version adopted."""

    def flush(self) -> Iterator[Packet]:
        """No data is left: hand in everything, and adopt what it leads to."""

    def abandon(self) -> None:
        """The island goes on from other parameters: whatever is under way is let go."""

    def progress(self) -> Progress:
        """For a checkpoint."""

    def snapshots(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint needs besides the parameters."""

    def outer_values(self) -> AbstractContextManager[None]:
        """The adopted outer parameters in the model for a while, to be judged."""


def adopted(
    rank: IslandRank, packet: Packet, fragment: int, digest: str, stall_s: float, dropped: float = 0.0
) -> None:
    """Check that what the ranks hold is what was published, and say so. `fragment` -1: all of them."""
    if digest != packet.digest:
        raise RuntimeError(
            f"island {rank.name} holds version {packet.number} of fragment {fragment} with digest {digest}, "
            f"the synchronizer published {packet.digest}"
        )
    fields = {"version": packet.number, "fragment": fragment, "digest": digest}
    fields |= {"stall_s": round(stall_s, 4), "dropped_update_fraction": round(dropped, 4)}
    rank.emit("adopted", fields)


def tokens_of(batch: np.ndarray) -> int:
    """Tokens that a batch [B, T + 1] predicts."""
    return batch.shape[0] * (batch.shape[1] - 1)
