"""AdamW whose bits do not depend on sharding, number of threads, or device.

The synchronous phase promises that islands of different sizes hold identical parameters and moments
after identical steps. torch's fused kernels break that: their vector body and their scalar tail
round differently, so a result depends on where in memory a number lies. Here every operation is one
elementwise multiplication, addition, division or square root, each correctly rounded by IEEE 754.
On the CPU the update of a
small model takes three hundredths of a step, where torch's fused one would take one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_CPU_BUCKET = 1 << 16  # elements updated together: what a core's cache holds
_BUCKET = 1 << 25  # on accelerators: few launches, temporaries of at most 256 MiB


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101), fp32, over named tensors, in place.

        m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g*g
        p = p*(1 - lr*wd) - lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)

    Weight decay is applied to tensors of two or more dimensions in their **whole** shape, which the
    caller says by `decayed`. All moments exist, as zeros, from the start: state that is created by
    the first step cannot be loaded before it, and is then lost without a word.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        decayed: frozenset[str],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.parameters = dict(parameters)
        self.exp_avg = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._buckets = list(_buckets(self.parameters, decayed))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Take one step with learning rate `lr`; `gradients` has every parameter's, same shapes."""
        self.steps += 1
        beta1, beta2 = self._betas
        correction1 = 1.0 - beta1**self.steps
        correction2 = (1.0 - beta2**self.steps) ** 0.5
        for names, decay in self._buckets:
            p = [self.parameters[name] for name in names]
            g = [gradients[name] for name in names]
            m = [self.exp_avg[name] for name in names]
            v = [self.exp_avg_sq[name] for name in names]
            if decay and self._weight_decay:
                torch._foreach_mul_(p, 1.0 - lr * self._weight_decay)
            torch._foreach_mul_(m, beta1)
            torch._foreach_add_(m, torch._foreach_mul(g, 1.0 - beta1))
            square = torch._foreach_mul(g, g)
            torch._foreach_mul_(square, 1.0 - beta2)
            torch._foreach_mul_(v, beta2)
            torch._foreach_add_(v, square)
            del square
            scale = torch._foreach_sqrt(v)
            torch._foreach_div_(scale, correction2)
            torch._foreach_add_(scale, self._eps)
            update = torch._foreach_div(m, scale)
            torch._foreach_mul_(update, -lr / correction1)
            torch._foreach_add_(p, update)


def _buckets(parameters: Mapping[str, Tensor], decayed: frozenset[str]) -> Iterator[tuple[list[str], bool]]:
    """Cut the names into runs that share their weight decay and hold a bounded number of elements."""
    for decay in (True, False):
        names: list[str] = []
        elements = 0
        for name, parameter in parameters.items():
            if (name in decayed) != decay:
                continue
            limit = _CPU_BUCKET if parameter.device.type == "cpu" else _BUCKET
            if names and elements + parameter.numel() > limit:
                yield names, decay
                names, elements = [], 0
            names.append(name)
            elements += parameter.numel()
        if names:
            yield names, decay
