"""Merge the encoded contributions of a round into one fp32 delta (DESIGN section 4, "Merge").

Contributions stay encoded as their ranks sent them (`weighted`): a shard needs no fp32 copy of each. The
bits depend neither on how the ranks cut the rows, nor on the chunks worked through at a time, nor on the
machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from elastic.training import chunks
from elastic.training.assemble import MergeError, Part, Tensors, check_names, pieces_of
from elastic.training.chunks import Scratch, row_slices
from elastic.training.codec import Codec, check_finite, encoded_shape, wire_dtype
from elastic.training.weighted import EncodedTensor, weighted_sum

MergeKind = Literal["mean", "rda", "trimmed"]
TRIM = 0.2
"""Share of the contributions that `trimmed` drops at either end."""
_EXCESS = 1e-6
"""Weights are quotients of sums: they may exceed one by rounding."""
_NOISE = 1e-6
"""Unit vectors that cancel to this share of their weights leave rounding errors, and no direction."""


@dataclass(frozen=True)
class Encoded:
    """One island's contribution as its ranks sent it: their rows, in one codec, cut anywhere."""

    codec: Codec
    parts: Sequence[Part]


@torch.no_grad()
def merge(
    contributions: Sequence[Encoded],
    weights: Sequence[float],
    shapes: Mapping[str, Sequence[int]],
    kind: MergeKind = "mean",
    embeddings: Set[str] = frozenset(),
    trim: float = TRIM,
) -> Tensors:
    """The merged delta: fp32 tensors of `shapes`, on the CPU.

    The weights are taken as they are and sum to one at most: what staleness takes off them shrinks the
    step. A contribution of weight 0 is left out, unread. Sort by (island, seq) before: the order is part
    of the bits.

    mean     sum(w * v)
    rda      by tensor, the mean length along the mean direction: sum(w * |v|) * unit(sum(w * unit(v)));
             a zero tensor has no direction; `embeddings` by mean (Decoupled DiLoCo, arXiv 2604.21428)
    trimmed  by coordinate, sum(w) times the unweighted mean of what is left without the floor(trim * M)
             largest and smallest of M values, one at least; fewer than 3 contributions by mean
             (arXiv 1803.01498)

    Raises MergeError unless every row of every tensor comes exactly once in every contribution, and
    NonFiniteTensor for Inf or NaN; both name the contribution, by its number here, and the tensor.
    """
    _check_weights(contributions, weights, trim)
    used = [
        (f"contribution {number}: ", contribution, weight)
        for number, (contribution, weight) in enumerate(zip(contributions, weights, strict=True))
        if weight > 0
    ]
    for label, contribution, _ in used:
        check_names(contribution.parts, shapes, label)
    shares = [weight for _, _, weight in used]
    buffers = _Buffers(Scratch(), Scratch())
    merged: Tensors = {}
    for name in sorted(shapes):
        sources = [_source(label, contribution, name, shapes[name]) for label, contribution, _ in used]
        way = _way(kind, name in embeddings, len(used), trim)
        merged[name] = torch.empty(tuple(shapes[name]))
        if merged[name].numel():
            way(sources, shares, torch.atleast_1d(merged[name]), buffers)
    return merged


@dataclass(frozen=True)
class _Buffers:
    one: Scratch
    several: Scratch


_Way = Callable[[list[EncodedTensor], list[float], Tensor, _Buffers], None]
"""Writes the merge of one tensor, of one dimension or more, into its third argument."""


def _way(kind: MergeKind, embedding: bool, count: int, trim: float) -> _Way:
    if kind == "rda" and not embedding:
        return _rda
    if kind == "trimmed" and count >= 3:
        dropped = max(1, math.floor(trim * count))
        return lambda sources, weights, out, buffers: _trimmed(sources, weights, out, buffers, dropped)
    return _mean


def _mean(sources: list[EncodedTensor], weights: list[float], out: Tensor, buffers: _Buffers) -> None:
    # A mean of finite values is finite: only if it is not, look for the contribution that is to blame.
    if not weighted_sum(sources, weights, out):
        for source in sources:
            deque(source.decoded(out.shape, buffers.one), maxlen=0)
        check_finite(out, f"the merge of {sources[0].where}")


def _rda(sources: list[EncodedTensor], weights: list[float], out: Tensor, buffers: _Buffers) -> None:
    norms = [_norm(source.decoded(out.shape, buffers.one)) for source in sources]
    length = math.fsum(weight * norm for weight, norm in zip(weights, norms, strict=True))
    # Only the direction of the sum matters: the largest factor may be one, so that none overflows.
    factors = [weight / norm if norm else 0.0 for weight, norm in zip(weights, norms, strict=True)]
    largest = max(factors)
    if not largest:
        out.zero_()
        return
    weighted_sum(sources, [factor / largest for factor in factors], out)
    direction = _norm(out[rows] for rows in row_slices(out.shape))
    if direction * largest <= _NOISE * math.fsum(weights):
        out.zero_()
        return
    for rows in row_slices(out.shape):
        out[rows].mul_(length / direction)
    check_finite(out, f"the merge of {sources[0].where}")


def _norm(rows: Iterable[Tensor]) -> float:
    """Euclidean norm of a tensor that comes a few rows at a time, the same on every machine.

    Rows are squared and summed in fp64 by halves, an order of our own unlike that of torch's sums, and
    `fsum` adds them up exactly.
    """
    return math.sqrt(math.fsum(square for chunk in rows for square in _squares(chunk)))


def _squares(chunk: Tensor) -> list[float]:
    values = chunk.reshape(len(chunk), -1).to(torch.float64)
    values.mul_(values)
    width = values.shape[1]
    while width > 1:
        half = width // 2
        values[:, :half].add_(values[:, width - half : width])
        width -= half
    return values[:, 0].tolist()


def _trimmed(
    sources: list[EncodedTensor], weights: list[float], out: Tensor, buffers: _Buffers, dropped: int
) -> None:
    count, factor = len(sources), math.fsum(weights) / (len(sources) - 2 * dropped)
    for rows in row_slices(out.shape, chunks.CHUNK // count):
        chunk = out[rows]
        values = buffers.several.get((count, *chunk.shape))
        for source, held in zip(sources, values, strict=True):
            source.read(rows, held)
            check_finite(held, source.where)
            held.add_(
                0.0
            )  # a negative zero becomes zero: which of the two a maximum is depends on the machine
        _sort_ends(values, dropped, buffers.one)
        chunk.copy_(values[dropped])
        for held in values[dropped + 1 : count - dropped]:
            chunk.add_(held)
        chunk.mul_(factor)


def _sort_ends(values: Tensor, dropped: int, scratch: Scratch) -> None:
    """Exchange values along dimension 0 until the `dropped` smallest and largest stand at its ends.

    Bubbles of whole chunks: many times faster than torch.sort for the few contributions of a round.
    """
    for done in range(dropped):
        last = len(values) - 1 - done
        for low in range(done, last):
            _exchange(values[low], values[low + 1], scratch)
        for low in reversed(range(done, last - 1)):
            _exchange(values[low], values[low + 1], scratch)


def _exchange(low: Tensor, high: Tensor, scratch: Scratch) -> None:
    smaller = torch.minimum(low, high, out=scratch.like(low))
    torch.maximum(low, high, out=high)
    low.copy_(smaller)


def _source(label: str, contribution: Encoded, name: str, shape: Sequence[int]) -> EncodedTensor:
    codec = contribution.codec
    dtype = wire_dtype(codec, len(shape))
    pieces = pieces_of(name, contribution.parts, encoded_shape(codec, shape), dtype, label)
    return EncodedTensor(f"{label}{name}", codec, [(start, torch.atleast_1d(rows)) for start, rows in pieces])


def _check_weights(contributions: Sequence[Encoded], weights: Sequence[float], trim: float) -> None:
    if not contributions or len(contributions) != len(weights):
        saw = f"{len(contributions)}, {len(weights)} weights"
        raise MergeError("a merge needs one weight per contribution", saw=saw)
    total = math.fsum(weights)
    if not (0 < total <= 1 + _EXCESS and min(weights) >= 0):
        raise MergeError(
            "weights must not be negative, not all zero, and sum to one at most", saw=str(list(weights))
        )
    if not 0 <= trim < 0.5:
        raise MergeError("the share trimmed at either end must be less than a half", saw=str(trim))
