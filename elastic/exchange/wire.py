"""The form in which tensors travel: named rows as numpy arrays, with the codec that made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from elastic.base.errors import ElasticError
from elastic.training.codec import Codec, decode, encode, encoded_shape, wire_dtype

_ARRAY_TYPES: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.uint8: np.dtype(np.uint8),
}


class MalformedArray(ElasticError):
    """An array from the wire is not what its codec makes of that tensor; it is refused by name.

    Example: an island of another version sends `head.weight` under int4 with 64 bytes a row instead of 66.
    """


@dataclass(frozen=True)
class Wire:
    """Rows of named tensors in one codec.

    `arrays` maps a name to (first row, array): float32 [R, ...], uint16 [R, ...] for the bits of bf16, or
    uint8 [R, bytes of a row] under a block codec. Tensors of one dimension or none are always float32.
    """

    codec: Codec
    arrays: Mapping[str, tuple[int, np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Payload size in bytes, without names and framing."""
        return sum(array.nbytes for _, array in self.arrays.values())


def pack(rows: Mapping[str, tuple[int, torch.Tensor]], codec: Codec) -> Wire:
    """Encode rows (name -> (first row, fp32 rows)). The arrays are copies: the sender may go on."""
    arrays = {}
    for name, (start, tensor) in rows.items():
        encoded = encode(codec, tensor.detach(), name)
        arrays[name] = (start, to_array(encoded, copy=encoded.dtype == tensor.dtype))
    return Wire(codec, arrays)


def pack_encoded(tensors: Mapping[str, torch.Tensor], codec: Codec) -> Wire:
    """Whole tensors that are encoded already; the arrays share their memory."""
    return Wire(codec, {name: (0, to_array(tensor, copy=False)) for name, tensor in tensors.items()})


def unpack(wire: Wire, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, torch.Tensor]]:
    """Decode to name -> (first row, fp32 rows). `shapes` are those of the whole tensors.

    Raises MalformedArray.
    """
    return {
        name: (start, unpack_array(wire.codec, name, array, shapes[name]))
        for name, (start, array) in wire.arrays.items()
    }


def unpack_rows(wire: Wire, name: str, shape: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Decode rows start..stop of a whole tensor of this shape: a rank takes its rows without the rest.

    A tensor without dimensions has no rows and comes whole. Raises MalformedArray.
    """
    _, array = wire.arrays[name]
    if shape and len(array) != shape[0]:
        raise _malformed(name, array, f"{shape[0]} rows of a tensor of shape {tuple(shape)}")
    return unpack_array(wire.codec, name, array[start:stop] if shape else array, shape)


def unpack_array(codec: Codec, name: str, array: np.ndarray, shape: Sequence[int]) -> torch.Tensor:
    """Decode rows of a tensor of this whole shape to fp32, in their own memory. Raises MalformedArray."""
    check_array(codec, name, array, shape)
    encoded = to_encoded(array)
    decoded = decode(codec, encoded, (*array.shape[:1], *shape[1:]))
    return decoded.clone() if decoded is encoded else decoded


def check_array(codec: Codec, name: str, array: np.ndarray, shape: Sequence[int]) -> None:
    """Refuse an array that cannot be rows of the encoded tensor `name` of this whole shape."""
    dtype = _ARRAY_TYPES[wire_dtype(codec, len(shape))]
    row = encoded_shape(codec, shape)[1:]
    fits = array.ndim == len(row) + bool(shape) and array.shape[1:] == row
    if array.dtype != dtype or not fits or (shape and len(array) > shape[0]):
        rows = (f"up to {shape[0]}",) if shape else ()
        expected = ", ".join(map(str, (*rows, *row)))
        raise _malformed(name, array, f"{dtype} [{expected}] for {codec} of shape {tuple(shape)}")


def to_array(tensor: torch.Tensor, copy: bool) -> np.ndarray:
    """The numpy form of an encoded tensor."""
    tensor = tensor.to("cpu", copy=copy).contiguous()
    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def to_encoded(array: np.ndarray) -> torch.Tensor:
    """The encoded tensor of an array, without decoding; only read it, since it may share its memory."""
    writable = array if array.flags.writeable else array.copy()
    if array.dtype == np.uint16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def _malformed(name: str, array: np.ndarray, expected: str) -> MalformedArray:
    return MalformedArray(
        f"the array is not {expected}",
        where=name,
        saw=f"{array.dtype} {list(array.shape)}",
        fix="run the same version of elastic and the same model on every island",
    )
