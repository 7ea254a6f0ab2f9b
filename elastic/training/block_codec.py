"""Block codecs int8, int4 and e3m0: one bf16 scale for each 128 values of a row.

A matrix [R, C] is encoded as uint8 [R, row_bytes(C)]. Every row holds `[scales | payload]` of its own, so
slicing and joining encoded rows is slicing and joining the matrix, and no number depends on the sharding.
Blocks lie along the row; the last one may be short.

    int8   round(x / s), s = max / 127                 one byte each
    int4   round(x / s), s = max / 7.45, in -7..7      two's complement, two a byte
    e3m0   0 or +-s * 2**-k, k = 0..6, s = max         sign and 3 bits (7 - k, 0 for zero), two a byte

Rounding is to the nearest value, in linear space for e3m0 too, where zero keeps its sign. A row's payload is
that of its spans: whole blocks, up to 2**17 values a span, then the short block. Two a byte: the low halves
of a span's bytes hold its first half, the high halves its second.
A code times a scale has at most 15 significant bits: decoding is exact in fp32, so a fused multiply-add
cannot change the bits of `base + decoded`. docs/design/0006-codecs.md has the measurements behind this.

Source: e3m0 is the 4-bit format of Streaming DiLoCo (arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BlockCodec = Literal["int8", "int4", "e3m0"]

BLOCK = 128
SPAN = 1 << 17
MIN_SCALE = 2.0**-100
"""A block with this scale or a smaller one travels as zeros: no number in play is near the denormals."""
MAX_SCALE = 2.0**100
"""A block with a larger scale is refused: no number in play overflows."""

# An int4 block may have its largest value at up to 7.5 steps, still half a step or less from 7. A scale
# rounded to bf16 is too small by 1/256 at most, so 7.45 stays below 7.5 (and 127 below 127.5).
_STEPS: dict[BlockCodec, float] = {"int8": 127.0, "int4": 7.45, "e3m0": 1.0}
# With the top level at 2**-8, the exponent bits of a half float are those of e3m0: 7..1 for its levels and 0
# for the denormals below. Decoded int4 codes are multiples of 16.
_HALF_TOP = 2.0**-8
DECODED_UNIT: dict[BlockCodec, float] = {"int8": 1.0, "int4": 16.0, "e3m0": _HALF_TOP}
_HALF_ULP = 1 << 9
_MANTISSA_BITS = 10
_SIGN_AND_LEVEL = -0x8000 | 0x1C00

_CACHED_VALUES = 1 << 17
_DEVICE_VALUES = 1 << 24


def row_bytes(codec: BlockCodec, columns: int) -> int:
    """Bytes of one encoded row of `columns` values, scales included."""
    return scale_bytes(columns) + sum(span.payload_bytes(codec) for span in spans_in(columns))


def encode_blocks(codec: BlockCodec, values: Tensor, out: Tensor) -> bool:
    """Encode fp32 [R, C] into `out`, uint8 [R, row_bytes]; False if a block cannot be held.

    That is a block with a NaN or an Inf, or one whose scale would exceed MAX_SCALE; then `out` is no use.
    """
    rows, columns = values.shape
    scales = torch.empty((rows, blocks_in(columns)), dtype=torch.bfloat16, device=values.device)
    scratch = Buffers(values.device)
    for span, payload in payloads_of(codec, out, columns):
        for tile, tile_scales, codes in _tiles(span.cut(values), span.of_blocks(scales), payload):
            _pack(codec, _scale(codec, tile, tile_scales, scratch), codes, scratch)
    out[:, : scale_bytes(columns)].copy_(scales.view(torch.uint8))
    return bool((scales <= MAX_SCALE).all())  # a NaN is not


def decode_blocks(codec: BlockCodec, encoded: Tensor, out: Tensor) -> None:
    """Decode uint8 [R, row_bytes] into `out`, fp32 [R, C]; exact."""
    rows, columns = out.shape
    scales = torch.empty((rows, blocks_in(columns)), dtype=torch.bfloat16, device=out.device)
    scales.view(torch.uint8).copy_(encoded[:, : scale_bytes(columns)])
    units = scales.to(torch.float32).div_(DECODED_UNIT[codec])  # by a power of two: exact
    scratch = Buffers(out.device)
    for span, payload in payloads_of(codec, encoded, columns):
        for tile, tile_units, codes in _tiles(span.cut(out), span.of_blocks(units), payload):
            unpack(codec, codes, tile.flatten(1), scratch)
            tile.mul_(tile_units)


@dataclass(frozen=True)
class Span:
    """Part of each row: columns start..stop, in blocks of `width` values."""

    start: int
    stop: int
    width: int

    def payload_bytes(self, codec: BlockCodec) -> int:
        """Bytes of its codes in each row."""
        values = self.stop - self.start
        return values if codec == "int8" else (values + 1) // 2

    def cut(self, matrix: Tensor) -> Tensor:
        """Its part of [R, C], as [R, blocks, width]."""
        return matrix[:, self.start : self.stop].unflatten(1, (-1, self.width))

    def of_blocks(self, scales: Tensor) -> Tensor:
        """Its part of [R, blocks of a row], as [R, blocks, 1]."""
        return scales[:, self.start // BLOCK : blocks_in(self.stop), None]


class Buffers:
    """Buffers of one call, by name. Calls run in many threads: none is shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The buffer `name` in this shape; it holds whatever was left there."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape:
            buffer = self._buffers[name] = torch.empty(shape, dtype=dtype, device=self._device)
        return buffer


def blocks_in(columns: int) -> int:
    """Blocks of a row; the last one may be short."""
    return -(-columns // BLOCK)


def scale_bytes(columns: int) -> int:
    """Bytes of a row's scales, which come first."""
    return torch.bfloat16.itemsize * blocks_in(columns)


def spans_in(columns: int) -> Iterator[Span]:
    """The spans of a row: whole blocks, SPAN values at a time, then the short block."""
    whole = columns // BLOCK * BLOCK
    for start in range(0, whole, SPAN):
        yield Span(start, min(whole, start + SPAN), BLOCK)
    if whole < columns:
        yield Span(whole, columns, columns - whole)


def payloads_of(codec: BlockCodec, encoded: Tensor, columns: int) -> Iterator[tuple[Span, Tensor]]:
    """The spans of [R, row_bytes], each with its payload as int8 [R, bytes]."""
    at = scale_bytes(columns)
    for span in spans_in(columns):
        size = span.payload_bytes(codec)
        yield span, encoded[:, at : at + size].view(torch.int8)
        at += size


def _tiles(values: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut [R, blocks, width] and its companions by rows: what a cache holds, or an accelerator wants."""
    size = _CACHED_VALUES if values.device.type == "cpu" else _DEVICE_VALUES
    height = max(1, size // (values.shape[1] * values.shape[2]))
    return zip(*(tensor.split(height) for tensor in (values, *others)), strict=True)


def _scale(codec: BlockCodec, values: Tensor, scales: Tensor, scratch: Buffers) -> Tensor:
    """Write the scales of [rows, blocks, width] to `scales`, bf16; return [rows, values] in units of them."""
    scaled = scratch.get("scaled", torch.float32, values.shape)
    scale = scratch.get("scale", torch.float32, scales.shape)
    torch.abs(values, out=scaled)
    torch.amax(scaled, 2, keepdim=True, out=scale)
    scales.copy_(scale.mul_(1 / _STEPS[codec]))
    torch.threshold_(scales, MIN_SCALE, 0.0)
    scale.copy_(scales).reciprocal_()
    torch.nan_to_num(scale, nan=0.0, posinf=0.0, out=scale)  # a block of zeros is zero units of 0
    if codec == "e3m0":
        scale.mul_(_HALF_TOP)
    return torch.mul(values, scale, out=scaled).flatten(1)


def _pack(codec: BlockCodec, scaled: Tensor, payload: Tensor, scratch: Buffers) -> None:
    """Round scaled values [rows, values] to codes and write them to `payload`, int8 [rows, bytes]."""
    if codec == "int8":
        payload.copy_(scaled.round_())
        return
    codes = scratch.get("codes", torch.int8, scaled.shape)
    half = payload.shape[1]
    lower, upper = codes[:, :half], codes[:, half:]
    both = payload[:, : upper.shape[1]]
    if codec == "int4":
        codes.copy_(scaled.round_())
        torch.bitwise_and(lower, 15, out=payload)
        torch.add(both, upper, alpha=16, out=both)
        return
    halves = scratch.get("halves", torch.float16, scaled.shape)
    bits = halves.copy_(scaled).view(torch.int16)
    codes.copy_(bits.add_(_HALF_ULP).bitwise_right_shift_(_MANTISSA_BITS))
    # The level is now in bits 0 to 2 of a code, and the sign in bits 5 to 7.
    sign = scratch.get("sign", torch.int8, payload.shape)
    torch.bitwise_right_shift(lower, 2, out=sign)
    torch.bitwise_and(lower, 7, out=payload)
    payload.bitwise_or_(sign.bitwise_and_(8))
    sign = sign[:, : upper.shape[1]]
    torch.add(both, upper, alpha=16, out=both)
    both.bitwise_or_(torch.bitwise_and(upper, -128, out=sign))


def unpack(codec: BlockCodec, payload: Tensor, out: Tensor, scratch: Buffers) -> None:
    """Write the codes of `payload`, int8 [rows, bytes], to `out`, fp32 [rows, values], in decoded units."""
    if codec == "int8":
        out.copy_(payload)
        return
    half = payload.shape[1]
    both = payload[:, : out.shape[1] - half]
    if codec == "int4":
        codes = scratch.get("codes", torch.int8, out.shape)
        torch.mul(payload, 16, out=codes[:, :half])
        torch.bitwise_and(both, -16, out=codes[:, half:])
        out.copy_(codes)
        return
    bits = scratch.get("bits", torch.int16, out.shape)
    bits[:, :half].copy_(torch.mul(payload, 16, out=scratch.get("lower", torch.int8, payload.shape)))
    bits[:, half:].copy_(both)
    bits.mul_(64).bitwise_and_(_SIGN_AND_LEVEL)
    out.copy_(bits.view(torch.float16))
