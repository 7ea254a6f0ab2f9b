"""The form in which tensors travel: named rows as numpy arrays, with the codec that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from elastic.training.codec import Codec, decode, encode


@dataclass(frozen=True)
class Wire:
    """Rows of named tensors in one codec.

    `arrays` maps a name to (first row, array [R, ...]): float32, or uint16 for the bits of bf16.
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


def to_array(tensor: torch.Tensor, copy: bool) -> np.ndarray:
    """The numpy form of an encoded tensor."""
    tensor = tensor.to("cpu", copy=copy).contiguous()
    return (
        tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )


def unpack_array(array: np.ndarray) -> torch.Tensor:
    """Decode one array to fp32; a fresh copy, since what came over the wire may be read-only."""
    if array.dtype == np.uint16:
        return decode(torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16))
    return torch.from_numpy(array.copy())


def unpack(wire: Wire) -> dict[str, tuple[int, torch.Tensor]]:
    """Decode to name -> (first row, fp32 rows)."""
    return {name: (start, unpack_array(array)) for name, (start, array) in wire.arrays.items()}


def unpack_rows(wire: Wire, name: str, start: int, stop: int) -> torch.Tensor:
    """Decode rows start..stop of one whole tensor: a rank takes its own rows without the rest."""
    _, array = wire.arrays[name]
    return unpack_array(array[start:stop] if array.ndim else array)
