"""The seeded order of the sequences: a different permutation each epoch, in constant memory.

The permutation is a generalised Feistel network with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002). A number below n is split into (left, right) of a grid of about
sqrt(n) by sqrt(n); each round adds to one half, modulo its side, a keyed hash of the other, which can be
undone and so is a bijection of the grid; a result at or above n goes through the network again. The hash
is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). All arithmetic is in unsigned 64-bit
integers, so every platform gives the same order. This is for mixing data, not for secrets.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

ROUNDS = 8
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Order:
    """Sequence ids by position: position p is sequence `order(p % n)` of epoch `p // n`."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        if not 0 < num_sequences < 1 << 62:
            raise ValueError(f"num_sequences must be between 1 and 2**62, got {num_sequences}")
        self.num_sequences, self.seed = num_sequences, seed

    def sequences(self, start: int, stop: int) -> np.ndarray:
        """Sequence ids [stop - start] int64 of the positions start..stop-1, across epochs where needed."""
        if not 0 <= start <= stop:
            raise ValueError(f"positions must be 0 <= start <= stop, got {start} and {stop}")
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, self.num_sequences)
            last = min(self.num_sequences, first + stop - start)
            numbers = np.arange(first, last, dtype=np.uint64)
            pieces.append(permute(numbers, self.num_sequences, self.seed, epoch))
            start += last - first
        return np.concatenate(pieces)


def permute(numbers: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of (seed, epoch) sends `numbers` [k] uint64 below n: [k] int64 below n."""
    keys = _keys(seed, epoch)
    result = _network(numbers, n, keys)
    outside = np.flatnonzero(result >= n)
    while outside.size:  # ends, since following the bijection from below n leads back below n
        walked = _network(result[outside], n, keys)
        result[outside] = walked
        outside = outside[walked >= n]
    return result.astype(np.int64)


def _network(numbers: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """One pass: a bijection of 0..rows*columns-1, the smallest grid of this shape that holds n."""
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    left, right = np.divmod(numbers, np.uint64(columns))
    for round_, key in enumerate(keys):
        if round_ % 2:
            right = (right + _hash(left, key) % np.uint64(columns)) % np.uint64(columns)
        else:
            left = (left + _hash(right, key) % np.uint64(rows)) % np.uint64(rows)
    return left * np.uint64(columns) + right


def _hash(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finaliser of number * golden ratio + key, modulo 2**64."""
    z = numbers * _MIX[0] + key
    z = (z ^ (z >> _SHIFTS[0])) * _MIX[1]
    z = (z ^ (z >> _SHIFTS[1])) * _MIX[2]
    return z ^ (z >> _SHIFTS[2])


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> np.ndarray:
    """ROUNDS keys of 64 bits from SHA-512 of the seed and the epoch."""
    digest = hashlib.sha512(f"elastic order {seed} {epoch}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=ROUNDS).astype(np.uint64)
