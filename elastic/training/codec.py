"""How tensors travel: `encode` to the wire's form, `decode` back to fp32.

fp32 is exact, bf16 rounds each value, and the block codecs int8, int4 and e3m0 (`block_codec`) take 1.02 or
0.52 bytes a value. Tensors of one dimension or none (norms, biases) are a thousandth of a model and travel
in fp32 under every codec. A tensor of more dimensions is a matrix of its rows, and every encoded row stands
for itself: whoever encodes, slices or joins rows, on CPU or GPU, gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic.base.errors import ElasticError
from elastic.base.outer_config import Codec as Codec
from elastic.training.block_codec import BlockCodec, decode_blocks, encode_blocks, row_bytes
from elastic.training.chunks import flat_runs

_PLAIN: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NonFiniteTensor(ElasticError):
    """A tensor that should travel or be merged holds an Inf or a NaN, or more than its codec can hold.

    Example: island `eu` diverged, and its delta of `head.weight` is NaN; the delta is refused by name.
    """


def wire_dtype(codec: Codec, ndim: int) -> torch.dtype:
    """Type in which a tensor of `ndim` dimensions travels; uint8 for rows of blocks."""
    return _PLAIN.get(codec, torch.uint8) if ndim >= 2 else torch.float32


def encoded_shape(codec: Codec, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the encoded form of a tensor (or of rows) of this shape."""
    blocks = _block_codec(codec, len(shape))
    return (shape[0], row_bytes(blocks, math.prod(shape[1:]))) if blocks else tuple(shape)


def nbytes(codec: Codec, shape: Sequence[int]) -> int:
    """Bytes of the encoded form of a tensor of this shape; exact."""
    return math.prod(encoded_shape(codec, shape)) * wire_dtype(codec, len(shape)).itemsize


def encode(codec: Codec, tensor: Tensor, name: str = "tensor") -> Tensor:
    """Encode an fp32 tensor for the wire, on its device. Raises NonFiniteTensor with `name`.

    The result has `encoded_shape` and `wire_dtype`; under fp32 it is the tensor itself. Rows may be encoded
    apart: the bytes are the same.
    """
    blocks = _block_codec(codec, tensor.ndim)
    if blocks is None:
        return _encode_plain(wire_dtype(codec, tensor.ndim), tensor, name)
    encoded = torch.empty(encoded_shape(codec, tensor.shape), dtype=torch.uint8, device=tensor.device)
    values = tensor.detach().to(torch.float32).reshape(_matrix(tensor.shape))
    if not encode_blocks(blocks, values, encoded):
        check_finite(values, name)
        raise NonFiniteTensor(
            f"values are too large for {codec}; the tensor is refused",
            where=name,
            saw=f"{values.abs().max().item():.3g}",
            fix="look at this island's loss and gradient norm; lower inner.lr if it diverged",
        )
    return encoded


def decode(codec: Codec, encoded: Tensor, shape: Sequence[int]) -> Tensor:
    """Decode to fp32 of `shape`, that of the rows encoded. fp32 comes back as the tensor itself."""
    if _block_codec(codec, len(shape)) is None:
        return encoded.to(torch.float32)
    out = torch.empty(tuple(shape), dtype=torch.float32, device=encoded.device)
    decode_into(codec, encoded, out)
    return out


def decode_into(codec: Codec, encoded: Tensor, out: Tensor) -> None:
    """Decode into `out`, fp32 and contiguous, of the shape of the rows encoded; the bits of `decode`."""
    blocks = _block_codec(codec, out.ndim)
    if blocks is None:
        out.copy_(encoded)
    else:
        decode_blocks(blocks, encoded, out.view(_matrix(out.shape)))


def _encode_plain(dtype: torch.dtype, tensor: Tensor, name: str) -> Tensor:
    """`tensor.to(dtype)`, checked while what was converted is still in the cache."""
    if tensor.dtype == dtype:
        check_finite(tensor, name)
        return tensor
    encoded = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    total = torch.zeros((), device=tensor.device)
    for values, converted in flat_runs(tensor.detach(), encoded):
        total += converted.copy_(values).sum(dtype=torch.float32)
    if not math.isfinite(total.item()):
        check_finite(encoded, name)
    return encoded


def _block_codec(codec: Codec, ndim: int) -> BlockCodec | None:
    """The block codec that applies to a tensor of `ndim` dimensions, if one does."""
    return None if ndim < 2 or codec in ("fp32", "bf16") else codec


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


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
