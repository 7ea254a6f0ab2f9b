"""The outer loop's arithmetic: step the global parameters, publish, adopt (merging: `merge`).

Everything is fp32, over plain dictionaries of named tensors, in a fixed order, as separate
multiplications and additions (no fused multiply-add): the same inputs give the same bits on every
machine, so a run can be replayed from its records and its digests compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elastic.training.assemble import Tensors, check_same
from elastic.training.chunks import Scratch, flat_runs, row_slices
from elastic.training.codec import Codec, decode, decode_into, encode, encoded_shape, wire_dtype


def delta(base: Mapping[str, Tensor], snapshot: Mapping[str, Tensor]) -> Tensors:
    """The pseudo-gradient `base - snapshot` of an island, whole tensors or rows alike (2311.08105)."""
    return {name: base[name] - snapshot[name] for name in base}


@torch.no_grad()
def encode_with_feedback(
    codec: Codec, delta: Tensor, residual: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    """Encode `delta + residual`, and what rounding leaves over: the residual of the next contribution.

    Whole tensors or rows alike, fp32 of one shape; `residual` None: the first contribution. Raises
    NonFiniteTensor with `name`. Error feedback of the up-link: arXiv 2505.23725.
    """
    wanted = delta if residual is None else delta + residual
    encoded = encode(codec, wanted, name)
    return encoded, wanted - decode(codec, encoded, wanted.shape)


@dataclass
class OuterState:
    """Global parameters `theta`, outer momentum, and `published`: what islands really hold.

    `published` differs from `theta` by the rounding of the down-link; the difference is part of the
    next packet (error feedback). Published tensors and packets are never written again, so whoever
    holds them has a consistent version. `theta`, `momentum` and `acc` are copies of what was given, and
    steps write into them: copy them to keep them.

    `acc` and `arrivals` belong to `step_delayed`: the sum of the deltas since the momentum moved last, and
    how many they are. `acc` is empty until it is used.
    """

    theta: Tensors
    momentum: Tensors = field(default_factory=dict)
    published: Tensors = field(default_factory=dict)
    acc: Tensors = field(default_factory=dict)
    arrivals: int = 0

    def __post_init__(self) -> None:
        """Fresh momentum is zero, and fresh `published` is `theta`."""
        self.theta, self.acc = _copy(self.theta), _copy(self.acc)
        self.momentum = _copy(self.momentum) or _zeros(self.theta)
        self.published = self.published or dict(self.theta)
        for other, what in ((self.momentum, "momentum"), (self.published, "published")):
            check_same(other, self.theta, what)
        if self.acc:
            check_same(self.acc, self.theta, "accumulator")

    @torch.no_grad()
    def step(self, d: Mapping[str, Tensor], lr: float, momentum: float, scale: float = 1.0) -> None:
        """SGD with Nesterov momentum in torch's form, on the merged delta `d` times `scale`.

            m = mu*m + d;  theta = theta - lr*(d + mu*m)

        With lr 1, mu 0, scale 1 `theta` becomes the mean of the islands (FedAvg).
        """
        check_same(d, self.theta, "merged delta")
        scaled, moved = Scratch(), Scratch()
        for name in sorted(self.theta):
            new = self._writable(name)
            for theta, out, m, gradient in flat_runs(self.theta[name], new, self.momentum[name], d[name]):
                if scale != 1.0:
                    gradient = torch.mul(gradient, scale, out=scaled.like(gradient))
                if momentum:
                    m.mul_(momentum).add_(gradient)
                    gradient = torch.mul(m, momentum, out=moved.like(m)).add_(gradient)
                if lr != 1.0:
                    gradient = torch.mul(gradient, lr, out=moved.like(gradient))
                torch.sub(theta, gradient, out=out)
            self.theta[name] = new

    @torch.no_grad()
    def step_delayed(self, g: Mapping[str, Tensor], lr: float, momentum: float, every: int) -> None:
        """Delayed Nesterov: one contribution at a time, as it arrives (arXiv 2401.09135, c = 0).

        Each arrival moves theta by its own share; the momentum moves with every N-th (`every`) only, by
        the mean of those N:

            acc = acc + g
            N-th:    m = mu*m + acc/N;  theta = theta - lr*(mu*m + g/N);  acc = 0
            others:  theta = theta - lr*g/N
        """
        check_same(g, self.theta, "delta")
        self.acc = self.acc or _zeros(self.theta)
        self.arrivals += 1
        moves, share = self.arrivals >= every, 1.0 / every
        self.arrivals = 0 if moves else self.arrivals
        shared, moved = Scratch(), Scratch()
        for name in sorted(self.theta):
            new = self._writable(name)
            mine = (self.theta[name], new, self.momentum[name], self.acc[name])
            for theta, out, m, acc, arrived in flat_runs(*mine, g[name]):
                acc.add_(arrived)
                step = torch.mul(arrived, share, out=shared.like(arrived))
                if moves:
                    m.mul_(momentum).add_(acc.mul_(share))
                    acc.zero_()
                    step.add_(torch.mul(m, momentum, out=moved.like(m)))
                torch.sub(theta, step.mul_(lr), out=out)
            self.theta[name] = new

    @torch.no_grad()
    def publish(self, codec_down: Codec) -> Tensors:
        """The packet that brings islands from the last `published` to the next, and take it here.

        fp32: the packet is `theta` itself. Otherwise it is the encoded `theta - published`, and
        `published` takes it as islands do (`adopt`); what rounding leaves over stays in that difference
        and goes with a later packet. Raises NonFiniteTensor by name, and then nothing is published.
        """
        if codec_down == "fp32":
            self.published = dict(self.theta)
            return dict(self.theta)
        packet: Tensors = {}
        published: Tensors = {}
        scratch, decoded = Scratch(), Scratch()
        for name, theta in self.theta.items():
            shape = encoded_shape(codec_down, theta.shape)
            packet[name] = torch.empty(shape, dtype=wire_dtype(codec_down, theta.ndim))
            published[name] = torch.empty_like(theta)
            rows_of = tuple(
                map(torch.atleast_1d, (theta, self.published[name], packet[name], published[name]))
            )
            for rows in row_slices(rows_of[0].shape):
                wanted, held, encoded, new = (tensor[rows] for tensor in rows_of)
                gap = torch.sub(wanted, held, out=scratch.like(wanted))
                encoded.copy_(encode(codec_down, gap, name))
                decode_into(codec_down, encoded, decoded.like(new))
                torch.add(held, decoded.like(new), out=new)
        self.published = published
        return packet

    def _writable(self, name: str) -> Tensor:
        """Where the next theta goes: itself, unless islands hold it as published."""
        theta = self.theta[name]
        return torch.empty_like(theta) if theta is self.published[name] else theta


@torch.no_grad()
def adopt(published: Mapping[str, Tensor], packet: Mapping[str, Tensor], codec_down: Codec) -> Tensors:
    """The next published values, from the last ones and a packet; on both sides, whole or by rows.

    By rows: `published` holds those of a rank, and `packet` the same rows of the encoded tensors.
    """
    if codec_down == "fp32":
        return dict(packet)
    return {name: held + decode(codec_down, packet[name], held.shape) for name, held in published.items()}


@torch.no_grad()
def adopt_blend(local: Mapping[str, Tensor], published: Mapping[str, Tensor], alpha: float) -> None:
    """In place: `local = alpha*local + (1 - alpha)*published` (2501.18512), for the tensors published.

    alpha 0 gives the bits of `published`.
    """
    for name, new in published.items():
        if alpha:
            local[name].mul_(alpha).add_(new * (1.0 - alpha))
        else:
            local[name].copy_(new)


@torch.no_grad()
def adopt_keep_progress(
    local: Mapping[str, Tensor], published: Mapping[str, Tensor], snapshot: Mapping[str, Tensor]
) -> None:
    """In place: `local = published + (local - snapshot)`, for the tensors published.

    Without progress since the snapshot that is the bits of `published`; `snapshot` may be `local` itself.
    """
    for name, new in published.items():
        local[name].sub_(snapshot[name]).add_(new)


def delta_norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of a delta (or a gradient), all tensors together, summed in fp64."""
    squares = [
        float(torch.linalg.vector_norm(tensors[name], dtype=torch.float64)) ** 2 for name in sorted(tensors)
    ]
    return math.sqrt(math.fsum(squares))


def _copy(tensors: Mapping[str, Tensor]) -> Tensors:
    return {
        name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()
    }


def _zeros(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}
