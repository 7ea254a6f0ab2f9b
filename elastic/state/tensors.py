"""Tensors at rest: safetensors files whose hash the caller keeps. Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from elastic.base.errors import IntegrityError
from elastic.state.storage import Storage, hash_file


@dataclass(frozen=True)
class Stored:
    """Where a tensor file lies, and what its content must be."""

    name: str
    sha256: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Stored:
        """Read what `to_json` wrote; further keys are left alone."""
        return Stored(str(fields["name"]), str(fields["sha256"]), int(fields["bytes"]))


def save(
    storage: Storage,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Stored:
    """Write a safetensors file, whole or not at all, and hash what was written.

    Peak memory is that of the tensors, plus copies of those that lie on a device, are not contiguous,
    or share memory with another.
    """
    plain = separate(tensors)
    hashed = storage.publish(name, lambda path: save_file(plain, path, dict(metadata or {})))
    return Stored(name, hashed.sha256, hashed.bytes)


def load(storage: Storage, stored: Stored) -> dict[str, torch.Tensor]:
    """Read a file on the CPU; raises IntegrityError if it is missing or not what was stored."""
    with _verified(storage, stored) as path:
        return load_file(path)


def load_rows(
    storage: Storage, stored: Stored, rows: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Read only rows `start .. stop` of some tensors; a tensor without dimensions is read whole.

    The whole file is hashed first, like in `load`.
    """
    with _verified(storage, stored) as path, safe_open(path, framework="pt") as file:
        return {
            name: file.get_slice(name)[start:stop]
            if file.get_slice(name).get_shape()
            else file.get_tensor(name)
            for name, (start, stop) in rows.items()
        }


def verify(storage: Storage, stored: Stored) -> None:
    """Hash a file without loading it; raises IntegrityError if it is missing or not what was stored."""
    try:
        seen = storage.hash(stored.name)
    except FileNotFoundError as error:
        raise IntegrityError("the file is missing", where=f"{storage.url}/{stored.name}") from error
    check(storage, stored, seen.sha256, seen.bytes)


def check(storage: Storage, stored: Stored, sha256: str, size_bytes: int) -> None:
    """Compare what was seen with what was stored; raises IntegrityError that names both."""
    if (sha256, size_bytes) != (stored.sha256, stored.bytes):
        raise IntegrityError(
            "the file is not what its record says",
            where=f"{storage.url}/{stored.name}",
            saw=f"{size_bytes} bytes, sha256 {sha256[:16]}...; "
            f"expected {stored.bytes} bytes, sha256 {stored.sha256[:16]}...",
            fix="restore the file from a copy, or let the run fall back to an older state",
        )


@contextmanager
def _verified(storage: Storage, stored: Stored) -> Generator[Path]:
    """A local path of the file, whose content is what was stored."""
    where = f"{storage.url}/{stored.name}"
    try:
        with storage.local_copy(stored.name) as path:
            seen = hash_file(path)
            check(storage, stored, seen.sha256, seen.bytes)
            yield path
    except FileNotFoundError as error:
        raise IntegrityError("the file is missing", where=where) from error
    except SafetensorError as error:
        raise IntegrityError(
            "not the safetensors file that was meant", where=where, saw=str(error)
        ) from error


def separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """CPU tensors that are contiguous and share no memory, as safetensors wants them."""
    seen: set[int] = set()
    separate: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        if plain.numel() and address in seen:
            plain = plain.clone()
        elif plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()  # a view of something larger
        seen.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    return separate
