"""Make a folder in secret and show it at once: nothing is visible under its name before it is complete.

Every writer works in a folder of its own, held by a file lock that the system lets go when the process
dies, so that leftovers of killed writers are told from those of living ones without clocks or process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

_PREFIX = ".preparing-"


@contextlib.contextmanager
def work_folder(folder: Path, key: str) -> Generator[Path, None, None]:
    """A new folder beside the future `folder / key`; removed at the end unless it was published.

    Also removes what killed writers left behind.
    """
    for lock in folder.glob(f"{_PREFIX}*.lock"):
        _remove_if_abandoned(lock)
    descriptor, name = tempfile.mkstemp(prefix=f"{_PREFIX}{key}-", suffix=".lock", dir=folder)
    lock = Path(name)
    work = lock.with_suffix(".work")
    try:
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay, nothing breaks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        work.mkdir()
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def publish(work: Path, target: Path, marker: str) -> bool:
    """Rename `work` to `target`; False when a complete `target`, one with `marker`, is already there."""
    _sync_folder(work)
    while True:
        try:
            os.rename(work, target)
        except OSError:
            if (target / marker).exists():
                return False
            if not target.exists():
                raise
            leftover = work.with_suffix(".old")  # somebody took its marker away
            os.rename(target, leftover)
            shutil.rmtree(leftover)
            continue
        _sync_folder(target.parent)
        return True


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove_if_abandoned(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_suffix(".work"), ignore_errors=True)
        lock.unlink(missing_ok=True)
    except OSError:  # its writer is alive, or the file system has no locks
        return
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
