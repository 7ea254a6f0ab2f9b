"""Work through large tensors by rows, as much at a time as a core's cache holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 17
"""Values at a time: 512 KiB of fp32. Results never depend on it."""


def row_slices(shape: Sequence[int], values: int | None = None) -> Iterator[slice]:
    """Cut the rows of a tensor of this shape (one dimension or more) into runs of about CHUNK values.

    `values`: another size, for work that needs several buffers. A run has one row at least.
    """
    height = max(1, (values or CHUNK) // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], height):
        yield slice(start, min(shape[0], start + height))


def flat_runs(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same runs of CHUNK values of tensors of one shape: views, of those that are contiguous."""
    return zip(*(tensor.reshape(-1).split(CHUNK) for tensor in tensors), strict=True)


class Scratch:
    """One fp32 buffer, as large as the largest chunk that was asked for; each shape is a view of it."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def like(self, chunk: Tensor) -> Tensor:
        """The buffer in the shape of `chunk`; it holds whatever was left there."""
        return self.get(chunk.shape)

    def get(self, shape: Sequence[int]) -> Tensor:
        """The buffer in this shape; it holds whatever was left there."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = torch.empty(size)
        return self._flat[:size].view(tuple(shape))
