"""The outer loop's arithmetic: merge contributions, step the global parameters, publish, adopt.

Everything is fp32 on the CPU, over plain dictionaries of named tensors, in a fixed order, as separate
multiplications and additions (no fused multiply-add): the same inputs give the same bits on every
machine, so a run can be replayed from its records and its digests compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic.base.errors import ElasticError
from elastic.training.codec import Codec, check_finite, decode, encode

Tensors = dict[str, Tensor]


class MergeError(ElasticError):
    """Contributions or parts do not fit together; names the first tensor that is wrong.

    Example: ranks 0 and 1 of island `eu` both sent rows 0-64 of `embedding.weight`.
    """


def delta(base: Mapping[str, Tensor], snapshot: Mapping[str, Tensor]) -> Tensors:
    """The pseudo-gradient `base - snapshot` of an island, whole tensors or rows alike (2311.08105)."""
    return {name: base[name] - snapshot[name] for name in base}


@torch.no_grad()
def merge(deltas: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Tensors:
    """Weighted mean `sum(w_i * delta_i) / sum(w_i)`, fp32, in the order given.

    Sort by (island, seq) before: the order is part of the bits. Weights need not add up to 1; a
    contribution of weight 0 adds nothing. Raises MergeError for names or shapes that differ and
    NonFiniteTensor, by name, for Inf or NaN.
    """
    if not deltas or len(deltas) != len(weights):
        raise MergeError(
            "a merge needs one weight per contribution", saw=f"{len(deltas)}, {len(weights)} weights"
        )
    total = math.fsum(weights)
    if not (math.isfinite(total) and total > 0 and min(weights) >= 0):
        raise MergeError("weights must be finite, not negative, and not all zero", saw=str(list(weights)))
    shares = [weight / total for weight in weights]
    for number, contribution in enumerate(deltas):
        _check_same(contribution, deltas[0], f"contribution {number}")
    merged: Tensors = {}
    for name in sorted(deltas[0]):
        for number, contribution in enumerate(deltas):
            check_finite(contribution[name], f"contribution {number}: {name}")
        mean = deltas[0][name] * shares[0]
        for contribution, share in zip(deltas[1:], shares[1:], strict=True):
            mean += contribution[name] * share
        merged[name] = mean
    return merged


@dataclass
class OuterState:
    """Global parameters `theta`, outer momentum, and `published`: what islands really hold.

    `published` differs from `theta` by the rounding of the down-link; the difference is part of the
    next packet (error feedback). A step replaces tensors and never writes into them, so a shallow copy
    of the dictionaries is a consistent snapshot.
    """

    theta: Tensors
    momentum: Tensors = field(default_factory=dict)
    published: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fresh momentum is zero, and fresh `published` is `theta`."""
        self.momentum = self.momentum or {name: torch.zeros_like(t) for name, t in self.theta.items()}
        self.published = self.published or {name: t.clone() for name, t in self.theta.items()}
        for other, what in ((self.momentum, "momentum"), (self.published, "published")):
            _check_same(other, self.theta, what)

    @torch.no_grad()
    def step(self, d: Mapping[str, Tensor], lr: float, momentum: float, scale: float = 1.0) -> None:
        """SGD with Nesterov momentum in torch's form, on the merged delta `d` times `scale`.

            m = mu*m + d;  theta = theta - lr*(d + mu*m)

        With lr 1, mu 0, scale 1 `theta` becomes the mean of the islands (FedAvg).
        """
        _check_same(d, self.theta, "merged delta")
        for name in sorted(self.theta):
            gradient = d[name] * scale if scale != 1.0 else d[name]
            if momentum:
                self.momentum[name] = self.momentum[name] * momentum + gradient
                gradient = gradient + self.momentum[name] * momentum
            self.theta[name] = self.theta[name] - (gradient * lr if lr != 1.0 else gradient)

    @torch.no_grad()
    def publish(self, codec_down: Codec) -> Tensors:
        """The packet that brings islands from the last `published` to the next, and take it here.

        fp32: the packet is `theta` itself. Otherwise it is the encoded `theta - published`; what
        rounding leaves over stays in that difference and goes with a later packet.
        """
        if codec_down == "fp32":
            packet = dict(self.theta)
        else:
            packet = {
                name: encode(codec_down, theta - self.published[name], name)
                for name, theta in self.theta.items()
            }
        self.published = adopt(self.published, packet, codec_down)
        return packet


@torch.no_grad()
def adopt(published: Mapping[str, Tensor], packet: Mapping[str, Tensor], codec_down: Codec) -> Tensors:
    """The next published values, from the last ones and a packet; on both sides, whole or by rows."""
    if codec_down == "fp32":
        return dict(packet)
    return {name: held + decode(packet[name]) for name, held in published.items()}


# ------------------------------------------------------------------------------------- parts


def assemble(
    parts: Sequence[Mapping[str, tuple[int, Tensor]]], shapes: Mapping[str, Sequence[int]]
) -> Tensors:
    """Put the ranks' parts together: each part maps a name to (first row, rows).

    `shapes` are the whole tensors'. Every row of every tensor must come exactly once, else MergeError
    with its name. A tensor without dimensions is one row. A part may hold no rows of a tensor.
    """
    for part in parts:
        for name in part:
            if name not in shapes:
                raise MergeError("a part holds a tensor that the model does not have", where=name)
    return {name: _assemble_one(name, parts, tuple(shape)) for name, shape in shapes.items()}


def _assemble_one(
    name: str, parts: Sequence[Mapping[str, tuple[int, Tensor]]], shape: tuple[int, ...]
) -> Tensor:
    pieces = sorted((part[name] for part in parts if name in part), key=lambda piece: piece[0])
    pieces = [(start, rows) for start, rows in pieces if rows.numel()]
    if math.prod(shape) == 0:
        return torch.zeros(shape)
    if not shape:
        if len(pieces) != 1 or pieces[0][1].shape != ():
            raise MergeError("a scalar must come exactly once", where=name, saw=f"{len(pieces)} times")
        return pieces[0][1]
    covered = 0
    for start, rows in pieces:
        if tuple(rows.shape[1:]) != shape[1:] or rows.dtype != pieces[0][1].dtype:
            raise MergeError(
                "rows of another shape or type",
                where=name,
                saw=f"{list(rows.shape)} {rows.dtype}",
                fix=f"rows of {list(shape)} {pieces[0][1].dtype}",
            )
        if start != covered:
            kind = "missing" if start > covered else "sent twice"
            first, last = sorted((start, covered))
            raise MergeError(f"rows {kind}", where=name, saw=f"rows {first} to {last} of {shape[0]}")
        covered = start + rows.shape[0]
    if covered != shape[0]:
        kind = "missing" if covered < shape[0] else "beyond the end"
        first, last = sorted((covered, shape[0]))
        raise MergeError(f"rows {kind}", where=name, saw=f"rows {first} to {last} of {shape[0]}")
    return pieces[0][1] if len(pieces) == 1 else torch.cat([rows for _, rows in pieces])


def delta_norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of a delta (or a gradient), all tensors together, summed in fp64."""
    squares = [
        float(torch.linalg.vector_norm(tensors[name], dtype=torch.float64)) ** 2 for name in sorted(tensors)
    ]
    return math.sqrt(math.fsum(squares))


def _check_same(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise MergeError(f"{what} has other tensors", saw=f"missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape or tensors[name].dtype != torch.float32:
            raise MergeError(
                f"{what} has another shape or type",
                where=name,
                saw=f"{list(tensors[name].shape)} {tensors[name].dtype}",
                fix=f"{list(tensor.shape)} {torch.float32}",
            )
