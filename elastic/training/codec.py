"""How tensors travel: `encode` to the wire's type, `decode` back to fp32.

fp32 is exact. bf16 halves the traffic of matrices; tensors of one dimension or none (norms, biases)
are a thousandth of a model and travel in fp32 under every codec. Rounding is to nearest, ties to
even, on CPU and GPU alike, so every island decodes the same bits.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from elastic.base.errors import ElasticError

Codec = Literal["fp32", "bf16"]

_TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NonFiniteTensor(ElasticError):
    """A tensor that should travel or be merged holds an Inf or a NaN; it is refused by name.

    Example: island `eu` diverged, and its delta of `head.weight` is NaN.
    """


def wire_dtype(codec: Codec, ndim: int) -> torch.dtype:
    """Type in which a tensor of `ndim` dimensions travels."""
    return _TYPES[codec] if ndim >= 2 else torch.float32


def nbytes(codec: Codec, numel: int, ndim: int = 2) -> int:
    """Bytes of `numel` encoded values of a tensor of `ndim` dimensions; exact."""
    return numel * wire_dtype(codec, ndim).itemsize


def encode(codec: Codec, tensor: Tensor, name: str = "tensor") -> Tensor:
    """Encode an fp32 tensor for the wire; same shape. Raises NonFiniteTensor with `name`.

    The fp32 codec returns the tensor itself. Rows may be encoded apart: the bits are the same.
    """
    encoded = tensor.to(wire_dtype(codec, tensor.ndim))
    check_finite(encoded, name)
    return encoded


def decode(encoded: Tensor) -> Tensor:
    """Decode to fp32; same shape. fp32 comes back as the tensor itself."""
    return encoded.to(torch.float32)


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse, by name, a tensor that holds an Inf or a NaN."""
    # A sum is one fast pass and is finite only if every term is; if it is not, look closely, since
    # very large terms may overflow it.
    if math.isfinite(tensor.sum(dtype=torch.float32).item()) or bool(tensor.isfinite().all()):
        return
    bad = int(tensor.numel() - tensor.isfinite().sum())
    raise NonFiniteTensor(
        "values are not finite; the tensor is refused",
        where=name,
        saw=f"{bad} Inf or NaN of {tensor.numel()}",
        fix="look at this island's loss and gradient norm; lower inner.lr if it diverged",
    )
