"""The run folder as named files, wherever it lies: a path, a mount, or a bucket.

Every name is relative, with `/` between folders. A file is visible complete or not at all; nothing is
appended or renamed. Trouble that passes (a lost connection, a rate limit) is retried with back-off up
to a deadline, counted and reported; what remains is a `StorageError` (exit 75), or, as long as the
folder has never been usable, a `RunFolderError` (exit 2).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic.base.errors import RunFolderError
from elastic.state.local_files import LocalFiles
from elastic.state.remote_files import RemoteFiles
from elastic.state.retry import OnRetry, Patience, Retry

T = TypeVar("T")
Names = list[str]

_CHUNK_BYTES = 4 * 2**20
_READERS = 16
_DEFAULT_RETRY = Retry()


@dataclass(frozen=True)
class Hashed:
    """The sha256 (hex) and the size of a file's content."""

    sha256: str
    bytes: int


class Storage:
    """The files of one run folder.

    `options` go to the fsspec file system, the same for every operation. `on_retry(verb, name, error,
    wait_s)` is told of each retry; `retries` counts them. A Storage can be pickled, shared by threads,
    and used after a spawn; the file system is opened by the first use in each process.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        *,
        retry: Retry = _DEFAULT_RETRY,
        sleep: Callable[[float], None] = time.sleep,
        on_retry: OnRetry | None = None,
    ) -> None:
        self.options = dict(options or {})
        self._opened: LocalFiles | RemoteFiles | None = None
        self._opened_by = 0
        self._protocol, self._root = _split_url(os.fspath(url))
        self.is_local = self._protocol == "file"
        self.url = self._root if self.is_local else f"{self._protocol}://{self._root}"
        self._patience = Patience(self.url, retry, sleep, on_retry)

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    def __reduce__(self):
        return (_unpickle, (self.url, self.options, self._patience.retry, self._patience.usable))

    @property
    def retries(self) -> int:
        """How often a call was tried again so far."""
        return self._patience.count

    # ------------------------------------------------------------------------------------ writing

    def write(self, name: str, data: bytes) -> None:
        """Replace the file, atomically."""
        self._do("write", name, lambda files: files.write(name, data))

    def create(self, name: str, data: bytes) -> None:
        """Write the file unless it exists; raises FileExistsError if it does.

        If a reply is lost and the retry finds the very same bytes there, they are ours: writers that
        compete must therefore never write equal bytes (records and locks carry an epoch or a token).
        """
        attempts = 0

        def once(files: LocalFiles | RemoteFiles) -> None:
            nonlocal attempts
            attempts += 1
            try:
                files.create(name, data)
            except FileExistsError:
                if attempts == 1 or files.read(name) != data:
                    raise
            except OSError as error:
                # Some S3-compatible stores answer a lost race in a way that s3fs reads as EINVAL.
                if error.errno == errno.EINVAL and files.exists(name) and files.read(name) != data:
                    raise FileExistsError(name) from error
                raise

        self._do("create", name, once)

    def publish(self, name: str, fill: Callable[[Path], object]) -> Hashed:
        """Let `fill(path)` write a temporary local file, then make it visible whole under `name`.

        If `fill` raises, nothing is published and nothing is left behind. Returns what was published.
        """
        written: list[Hashed] = []

        def fill_and_hash(path: Path) -> None:
            fill(path)
            written.append(hash_file(path))

        def once(files: LocalFiles | RemoteFiles) -> None:
            if isinstance(files, LocalFiles):
                files.publish(name, fill_and_hash)
            else:
                with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
                    files.publish(name, fill_and_hash, Path(folder) / "file")

        self._do("publish", name, once)
        return written[-1]

    def put_file(self, local: str | os.PathLike[str], name: str) -> str:
        """Copy a local file to `name`; returns the sha256 of what was copied."""
        return self.publish(name, lambda path: _copy(Path(local), path)).sha256

    def delete(self, name: str) -> None:
        """Remove the file; a missing one is fine."""
        self._do("delete", name, lambda files: files.delete(name))

    # ------------------------------------------------------------------------------------ reading

    def read(self, name: str) -> bytes:
        """The whole file; raises FileNotFoundError."""
        return self._do("read", name, lambda files: files.read(name))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Several files at once; one that is gone by now is left out."""

        def one(name: str) -> tuple[str, bytes | None]:
            try:
                return name, self.read(name)
            except FileNotFoundError:
                return name, None

        wanted = [*names]
        if self.is_local or len(wanted) < 2:
            pairs = [one(name) for name in wanted]
        else:
            with ThreadPoolExecutor(_READERS) as pool:
                pairs = [*pool.map(one, wanted)]
        return {name: data for name, data in pairs if data is not None}

    @contextmanager
    def local_copy(self, name: str) -> Generator[Path]:
        """A local path with the file's content: the file itself, or a download that goes away again."""
        local = self.path(name)
        if local is not None:
            yield local
            return
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
            target = Path(folder) / "file"
            self._do("read", name, lambda files: _download(files, name, target))
            yield target

    def get_file(self, name: str, local: str | os.PathLike[str]) -> str:
        """Copy the file to a local path, whole or not at all; returns the sha256 of the copy."""
        target = Path(local)
        with self.local_copy(name) as source:
            temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
            try:
                _copy(source, temporary)
                sha256 = hash_file(temporary).sha256
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        return sha256

    def hash(self, name: str) -> Hashed:
        """Hash and size of the stored content; raises FileNotFoundError."""
        with self.local_copy(name) as path:
            return self._do("read", name, lambda _: hash_file(path))

    def exists(self, name: str) -> bool:
        """True if the file is there."""
        return self._do("look for", name, lambda files: files.exists(name))

    def path(self, name: str = "") -> Path | None:
        """The local path of a name (of the run folder without one); None in a bucket."""
        if name:
            _check_name(name)
        return Path(self._root) / name if self.is_local else None

    def list(self, folder: str = "") -> Names:
        """Sorted names of all files at any depth under `folder`; none if it is not there."""
        return sorted(self._do("list", folder, lambda files: files.names(folder)))

    # ------------------------------------------------------------------------------------- probing

    def probe(self, must_see: str | None = None) -> None:
        """Find out in seconds whether the folder can be used: write, read back, create-only, delete.

        With `must_see`, a file that another node wrote must be visible here, too. Raises
        RunFolderError (exit 2) that says what to change, or StorageError (exit 75) if unreachable.
        """
        name = f".probe-{secrets.token_hex(8)}"
        self.create(name, b"first")
        try:
            if self.read(name) != b"first":
                raise RunFolderError("the run folder returns other bytes than were written", where=self.url)
            try:
                self.create(name, b"second")
            except FileExistsError:
                pass
            else:
                raise RunFolderError(
                    "the run folder overwrites on a create-only write, so a run lock cannot hold",
                    where=self.url,
                    fix="use a store with conditional writes (If-None-Match), or a shared file system",
                )
        finally:
            self.delete(name)
        if must_see is not None and not self.exists(must_see):
            raise RunFolderError(
                "this node sees another folder than the driver",
                where=f"{self.url} on {os.uname().nodename}",
                saw=f"{must_see} is not there",
                fix="put run_folder on a shared file system or in a bucket (s3://, gs://)",
            )
        self._patience.usable = True

    def clean_leftovers(self) -> int:
        """Remove temporary files that killed processes of this machine left; returns how many."""
        return self._files.clean_leftovers() if isinstance(self._files, LocalFiles) else 0

    # ------------------------------------------------------------------------------------ plumbing

    @property
    def _files(self) -> LocalFiles | RemoteFiles:
        if self._opened is None or self._opened_by != os.getpid():  # connections do not survive a fork
            self._opened = (
                LocalFiles(Path(self._root))
                if self.is_local
                else RemoteFiles(self._protocol, self._root, self.options)
            )
            self._opened_by = os.getpid()
        return self._opened

    def _do(self, verb: str, name: str, call: Callable[[LocalFiles | RemoteFiles], T]) -> T:
        if name or verb != "list":
            _check_name(name)
        files = self._files
        return self._patience.call(verb, name, lambda: call(files))


def hash_file(path: Path) -> Hashed:
    """Hash and size of a local file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Hashed(digest.hexdigest(), size)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            writer.write(chunk)


def _download(files: LocalFiles | RemoteFiles, name: str, target: Path) -> None:
    if isinstance(files, RemoteFiles):
        files.download(name, target)


def _unpickle(url: str, options: dict[str, Any], retry: Retry, usable: bool) -> Storage:
    storage = Storage(url, options, retry=retry)
    storage._patience.usable = usable
    return storage


def _split_url(url: str) -> tuple[str, str]:
    """Protocol and root of a URL; a path is made absolute and has the protocol `file`."""
    protocol, separator, rest = url.partition("://")
    if not separator:
        protocol, rest = "file", url
    if "::" in url or not rest.strip("/ "):
        raise RunFolderError(
            "not a usable run folder",
            where=url or "(empty)",
            fix="give a path or a URL such as s3://bucket/runs/a",
        )
    if protocol in ("file", "local"):
        return "file", os.path.abspath(os.path.expanduser(rest))
    return protocol, rest.rstrip("/")


def _check_name(name: str) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\\]", name):
        raise ValueError(f"not a relative name of a run folder: {name!r}")
