"""Weighted sums of encoded tensors, without decoding them first: the inner loop of every merge.

A tensor is summed tile by tile (some rows of a span of columns), so that a tile, and what becomes of the
codes, stays in the cache. A block's codes become floats, which is exact, and are added times
`scale * weight`, one number per block, by torch's `addcmul_`. That rounds the product on some machines and
not on others, so the product must be exact: `scale * weight` keeps as many bits as leave room for a code in
fp32's 24. Then only the sum rounds, and the bits are the same everywhere. A weight is off by 2**-22 of
itself at most for int4, by the rounding of fp32 for e3m0, by 2**-18 for int8. fp32 and bf16 are multiplied
and then added; `add_(alpha=)` would fuse the two on some machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.training.block_codec import (
    DECODED_UNIT,
    BlockCodec,
    Buffers,
    Span,
    blocks_in,
    payloads_of,
    scale_bytes,
    spans_in,
    unpack,
)
from elastic.training.chunks import Scratch, row_slices
from elastic.training.codec import Codec, check_finite, decode_into

_CODE_BITS: dict[BlockCodec, int] = {"int8": 7, "int4": 3, "e3m0": 1}
"""Significant bits of a code: |code| is 127 or 7 at most, or a power of two."""


@dataclass(frozen=True)
class EncodedTensor:
    """One tensor of one contribution: runs of encoded rows in order, each with its first row.

    A tensor of one dimension is a column of rows of one value; one without dimensions is one row. `where`
    names contribution and tensor.
    """

    where: str
    codec: Codec
    pieces: list[tuple[int, Tensor]]

    def read(self, rows: slice, out: Tensor) -> None:
        """Decode these rows of the whole tensor into `out`."""
        for first, held in self.pieces:
            start, stop = max(first, rows.start), min(first + len(held), rows.stop)
            if start < stop:
                part = out[start - rows.start : stop - rows.start]
                decode_into(self.codec, held[start - first : stop - first], part)

    def decoded(self, shape: Sequence[int], scratch: Scratch) -> Iterator[Tensor]:
        """The rows of the whole tensor, of this shape, a chunk at a time in `scratch`.

        Raises NonFiniteTensor.
        """
        for rows in row_slices(shape):
            chunk = scratch.get((rows.stop - rows.start, *shape[1:]))
            self.read(rows, chunk)
            check_finite(chunk, self.where)
            yield chunk


def weighted_sum(sources: Sequence[EncodedTensor], weights: Sequence[float], out: Tensor) -> bool:
    """Write `sum(weight * source)`, in the order given, into `out`; whether all of it is finite.

    `out` is fp32 and contiguous, of the whole tensor's shape, of one dimension or more. It is not finite
    if a source is not, or if the sum overflows, which it cannot if the weights sum to one.
    """
    matrix = out.view(out.shape[0], math.prod(out.shape[1:]))
    scratch, finite = Buffers(out.device), True
    runs = [
        _run(source.codec, first, encoded, weight, out, scratch)
        for source, weight in zip(sources, weights, strict=True)
        for first, encoded in source.pieces
    ]
    for span in spans_in(matrix.shape[1]):
        lanes = [(run.first, run.stop, run.of_span(span)) for run in runs]
        for rows in row_slices((matrix.shape[0], span.stop - span.start)):
            tile = span.cut(matrix[rows]).zero_()
            for first, last, add in lanes:
                start, stop = max(first, rows.start), min(last, rows.stop)
                if start < stop:
                    add(slice(start - first, stop - first), tile[start - rows.start : stop - rows.start])
            finite = finite and math.isfinite(tile.sum().item())
    return finite


_Add = Callable[[slice, Tensor], None]
"""Adds these rows of a run, weighted, to a tile [rows, blocks, width]."""


@dataclass(frozen=True)
class _Plain:
    """A run of rows in fp32 or bf16, [R, C]."""

    first: int
    stop: int
    values: Tensor
    weight: float
    scratch: Buffers

    def of_span(self, span: Span) -> _Add:
        values = span.cut(self.values)

        def add(rows: slice, tile: Tensor) -> None:
            term = self.scratch.get("term", torch.float32, tile.shape)
            tile.add_(term.copy_(values[rows]).mul_(self.weight))

        return add


@dataclass(frozen=True)
class _Blocks:
    """A run of rows in blocks: `units` fp32 [R, blocks of a row], codes by the start of their span."""

    first: int
    stop: int
    codec: BlockCodec
    units: Tensor
    codes: dict[int, Tensor]
    scratch: Buffers

    def of_span(self, span: Span) -> _Add:
        units, codes = span.of_blocks(self.units), self.codes[span.start]

        def add(rows: slice, tile: Tensor) -> None:
            floats = self.scratch.get("floats", torch.float32, tile.shape)
            unpack(self.codec, codes[rows], floats.flatten(1), self.scratch)
            tile.addcmul_(floats, units[rows])

        return add


def _run(
    codec: Codec, first: int, encoded: Tensor, weight: float, out: Tensor, scratch: Buffers
) -> _Plain | _Blocks:
    stop, columns = first + len(encoded), math.prod(out.shape[1:])
    if out.ndim < 2 or codec in ("fp32", "bf16"):
        return _Plain(first, stop, encoded.reshape(len(encoded), columns), weight, scratch)
    codes = {span.start: payload for span, payload in payloads_of(codec, encoded, columns)}
    return _Blocks(first, stop, codec, _units(codec, encoded, weight, columns), codes, scratch)


def _units(codec: BlockCodec, encoded: Tensor, weight: float, columns: int) -> Tensor:
    """`scale * weight` of each block, fp32 [R, blocks of a row], in 24 bits less those of a code."""
    scales = torch.empty((len(encoded), blocks_in(columns)), dtype=torch.bfloat16)
    scales.view(torch.uint8).copy_(encoded[:, : scale_bytes(columns)])
    units = scales.to(torch.float32).mul_(weight / DECODED_UNIT[codec])
    dropped = _CODE_BITS[codec]
    units.view(torch.int32).add_(1 << (dropped - 1)).bitwise_and_(-1 << dropped)
    return units
