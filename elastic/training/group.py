"""Agreement between the ranks of one island.

A decision is taken by rank 0 and shared; nothing here is called from background threads. With one
rank everything is a plain return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Group:
    """The ranks of one island, over a CPU process group (gloo)."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.world_size, self._group = rank, world_size, process_group

    def share(self, decide: Callable[[], Any]) -> Any:
        """Rank 0 evaluates `decide`; every rank gets its JSON value.

        An exception of `decide` is raised by rank 0 after the others were told: they raise
        RuntimeError with its text, so that nobody is left in a collective.
        """
        if self.world_size == 1:
            return decide()
        error: Exception | None = None
        text = ""
        if self.rank == 0:
            try:
                text = json.dumps({"value": decide()})
            except Exception as raised:  # told to the other ranks, then raised again below
                error, text = raised, json.dumps({"error": f"{type(raised).__name__}: {raised}"})
        message = json.loads(self._broadcast(text.encode()))
        if error is not None:
            raise error
        if "error" in message:
            raise RuntimeError(f"rank 0 failed: {message['error']}")
        return message["value"]

    def _broadcast(self, payload: bytes) -> bytes:
        size = torch.tensor([len(payload)], dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._group)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks; int64 sums wrap around, as digests need."""
        if self.world_size == 1:
            return values
        total = values.detach().clone().cpu()
        dist.all_reduce(total, group=self._group)
        return total
