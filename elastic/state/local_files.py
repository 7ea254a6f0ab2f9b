"""Files of a run folder on a local or mounted file system, published so that no reader sees half a file.

A file is written under a temporary name in its own folder, flushed to disk, and then published with
one system call: `os.replace` (newest wins) or `os.link` (first wins). The folder is flushed after it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from elastic.state.process import ProcessIdentity, this_process

_TEMPORARY = ".tmp-"


class LocalFiles:
    """The files under `root`, by relative name with `/` between folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where the file lies."""
        return self.root / name if name else self.root

    def publish(self, name: str, fill: Callable[[Path], object], *, create: bool = False) -> None:
        """Let `fill` write a temporary file, then make it visible whole, or not at all.

        Raises FileExistsError if `create` and the name is taken.
        """
        final = self.path(name)
        temporary = _new_temporary(final.parent)
        mode = stat.S_IMODE(temporary.stat().st_mode)
        try:
            fill(temporary)
            temporary.chmod(mode)  # safetensors makes files that only their owner can read
            _flush(temporary)
            if create:
                _link_new(temporary, final)
            else:
                os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
        _flush(final.parent)

    def write(self, name: str, data: bytes) -> None:
        """Replace the file."""
        self.publish(name, lambda path: path.write_bytes(data))

    def create(self, name: str, data: bytes) -> None:
        """Write the file unless it is there; raises FileExistsError if it is."""
        self.publish(name, lambda path: path.write_bytes(data), create=True)

    def read(self, name: str) -> bytes:
        """The whole file; raises FileNotFoundError."""
        return self.path(name).read_bytes()

    def exists(self, name: str) -> bool:
        """True if it is a file."""
        try:
            return stat.S_ISREG(os.stat(self.path(name)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def names(self, folder: str) -> list[str]:
        """Names of all files at any depth under `folder`; none if the folder is not there."""
        found: list[str] = []

        def stop(error: OSError) -> None:  # os.walk would swallow it
            if not isinstance(error, FileNotFoundError):
                raise error

        for here, _, names in os.walk(self.path(folder), onerror=stop):
            relative = Path(here).relative_to(self.root)
            found += [(relative / n).as_posix() for n in names if not n.startswith(_TEMPORARY)]
        return found

    def delete(self, name: str) -> None:
        """Remove the file, and the folders that it leaves empty."""
        path = self.path(name)
        path.unlink(missing_ok=True)
        folder = path.parent
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone already
                return
            folder = folder.parent

    def clean_leftovers(self) -> int:
        """Remove temporary files of processes of this machine that are gone; returns how many."""
        removed = 0
        for here, _, names in os.walk(self.root):
            for name in names:
                if name.startswith(_TEMPORARY) and _owner_is_dead(name):
                    (Path(here) / name).unlink(missing_ok=True)
                    removed += 1
        return removed


def _new_temporary(folder: Path) -> Path:
    """An empty temporary file; makes the folder, again if a `delete` has just removed it as empty."""
    path = folder / f"{_TEMPORARY}{_owner()}-{secrets.token_hex(4)}"
    for attempt in range(5):
        _make_folder(folder)
        try:
            path.touch(exist_ok=False)
            break
        except FileNotFoundError:
            if attempt == 4:
                raise
    return path


def _owner() -> str:
    me = this_process()
    return f"{_tag(me.machine)}-{me.pid}-{me.start or '0'}"


def _tag(machine: str) -> str:
    return hashlib.sha256(machine.encode()).hexdigest()[:8]


def _owner_is_dead(name: str) -> bool:
    try:
        tag, pid, start, _ = name.removeprefix(_TEMPORARY).split("-")
        me = this_process()
        if tag != _tag(me.machine):
            return False
        return ProcessIdentity(me.host, me.machine, int(pid), "" if start == "0" else start).surely_dead()
    except ValueError:
        return False


def _make_folder(folder: Path) -> None:
    """`mkdir -p` whose folders survive a power cut; raises NotADirectoryError if a file is in the way."""
    if folder.is_dir():
        return
    if folder.exists() and not folder.is_dir():  # it may have appeared since
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _flush(folder.parent)


def _link_new(temporary: Path, final: Path) -> None:
    """Publish under a name that must be free. Raises FileExistsError, or OSError(ENOTSUP) without links."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        # Over NFS the reply to a link that succeeded can be lost: the link count tells.
        if os.stat(temporary).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise OSError(errno.ENOTSUP, "this file system has no hard links", str(final)) from error
        raise


def _flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network mounts cannot flush a folder; the rename itself is then all there is.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(handle)
