"""Files of a run folder in a bucket, or in any fsspec file system that can create-only.

Nothing is appended or renamed: an object store publishes a whole object or none. Create-only writes
are the store's own conditional put (`pipe_file(mode="create")`), never a look followed by a write.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import fsspec
from fsspec.asyn import AsyncFileSystem

from elastic.base.errors import RunFolderError

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_USABLE = "use a path, file://, s3:// or gs://"
_MEMORY_LOCK = threading.Lock()  # fsspec's memory files share one position; real stores need no lock


class RemoteFiles:
    """The files under `root` of the file system `protocol`, opened with `options` for every operation."""

    def __init__(self, protocol: str, root: str, options: dict[str, Any]) -> None:
        self.fs = open_file_system(protocol, options)
        self.root = str(self.fs._strip_protocol(f"{protocol}://{root}")).rstrip("/")
        self._lock: AbstractContextManager = (
            nullcontext() if isinstance(self.fs, AsyncFileSystem) else _MEMORY_LOCK
        )

    def path(self, name: str) -> str:
        """The file's full name in the store."""
        return f"{self.root}/{name}" if name else self.root

    def publish(self, name: str, fill: Callable[[Path], object], local: Path) -> None:
        """Let `fill` write the local file, then upload it whole."""
        fill(local)
        if isinstance(self.fs, AsyncFileSystem):
            self.fs.put_file(str(local), self.path(name))
        else:  # fsspec's general put_file would publish the part it wrote before an error
            self.write(name, local.read_bytes())

    def write(self, name: str, data: bytes) -> None:
        """Replace the file."""
        with self._lock:
            self.fs.pipe_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> None:
        """Write the file unless it is there; raises FileExistsError if it is."""
        with self._lock:
            self.fs.pipe_file(self.path(name), data, mode="create")

    def read(self, name: str) -> bytes:
        """The whole file; raises FileNotFoundError."""
        with self._lock:
            return cast(bytes, self.fs.cat_file(self.path(name)))

    def download(self, name: str, local: Path) -> None:
        """Copy the file to a local path."""
        if isinstance(self.fs, AsyncFileSystem):
            self.fs.get_file(self.path(name), str(local))
        else:
            local.write_bytes(self.read(name))

    def exists(self, name: str) -> bool:
        """True if it is a file."""
        with self._lock:
            self.fs.invalidate_cache()  # another host may have written since the last listing
            return bool(self.fs.isfile(self.path(name)))

    def names(self, folder: str) -> list[str]:
        """Names of all files at any depth under `folder`; none if the folder is not there."""
        with self._lock:
            self.fs.invalidate_cache()
            try:
                found = self.fs.find(self.path(folder))  # not glob: a folder name may hold [ ] ? *
            except FileNotFoundError:
                return []
        start = len(self.root.rstrip("/")) + 1
        return [str(path)[start:] for path in found]

    def delete(self, name: str) -> None:
        """Remove the file; a missing one is fine."""
        with self._lock:
            try:
                self.fs.rm_file(self.path(name))
            except FileNotFoundError:
                return


def open_file_system(protocol: str, options: dict[str, Any]) -> fsspec.AbstractFileSystem:
    """The fsspec file system; raises RunFolderError if unknown, not installed, or without create-only."""
    where = f"{protocol}://"
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        fix = f"pip install 'elastic-islands[{extra}]'" if extra else _USABLE
        raise RunFolderError(
            f"the package for {protocol}:// is not installed", where=where, saw=str(error), fix=fix
        ) from error
    except ValueError as error:
        raise RunFolderError("unknown protocol", where=where, saw=str(error), fix=_USABLE) from error
    if not _can_create(kind):
        raise RunFolderError(
            "no create-only write, which the run lock and the records need", where=where, fix=_USABLE
        )
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise RunFolderError(
            "the storage options do not fit", where=where, saw=f"{sorted(options)}: {error}", fix=_USABLE
        ) from error


def _can_create(kind: Any) -> bool:
    """True if the file system has its own `mode="create"`; fsspec's default one is not atomic."""
    if issubclass(kind, AsyncFileSystem):
        own = kind._pipe_file
        return own is not AsyncFileSystem._pipe_file and "mode" in inspect.signature(own).parameters
    return kind.pipe_file is not fsspec.AbstractFileSystem.pipe_file
