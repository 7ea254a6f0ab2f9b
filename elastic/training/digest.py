"""Digests of parameters that do not depend on sharding.

Each element contributes a hash of (tensor name, position, fp32 bits); contributions are summed
modulo 2**64. Sums of ranks add up to the digest of the whole, so islands of any size can show that
they hold the same bits without gathering a tensor. The digest finds faults, not forgeries: files
are protected by SHA-256 (`elastic.state`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

LANES = 2  # two independent 64-bit sums
_CHUNK = 1 << 15  # elements hashed at once: temporaries stay in the cache
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


# splitmix64's constants (Steele, Lea, Flood, 2014), as signed integers because torch has no uint64 arithmetic
_GAMMA, _MIX_1, _MIX_2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def partial_digest(rows: Mapping[str, tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Sums of the rows that one rank holds.

    `rows` maps a name to (first row, rows [R, ...] fp32). Returns int64 [LANES] on the CPU; partial
    digests of disjoint rows add (with wrap-around) to the digest of all of them.
    """
    total = torch.zeros(LANES, dtype=torch.int64)
    for name, (start, tensor) in rows.items():
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().to(torch.float32).contiguous().reshape(-1)
        row_size = flat.numel() // (tensor.shape[0] if tensor.dim() else 1)
        key = _signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
        for begin in range(0, flat.numel(), _CHUNK):
            piece = flat[begin : begin + _CHUNK]
            first = start * row_size + begin
            where = torch.arange(first, first + piece.numel(), dtype=torch.int64, device=piece.device)
            bits = piece.view(torch.int32).to(torch.int64)
            hashed = _mix((where * _GAMMA + key) ^ (bits * _MIX_2))
            total[0] += hashed.sum().cpu()
            total[1] += (_shift_right(hashed, 29) * _MIX_1).sum().cpu()
    return total


def finish_digest(total: torch.Tensor) -> str:
    """The hexadecimal form of summed partial digests, 32 characters."""
    return "".join(f"{int(value) & _MASK:016x}" for value in total.tolist())


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of whole tensors, by name; equal to the sum over any sharding by rows."""
    return finish_digest(partial_digest({name: (0, tensor) for name, tensor in tensors.items()}))
