"""Names in a run folder: one function per kind of file, so that nobody spells a name twice.

Files that a synchronizer writes carry the epoch of its run lock. A driver that lost the lock and does
not know it yet can therefore never overwrite a file of its successor.
"""

from __future__ import annotations

import re

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
RECORDS = "state"
TENSORS = "outer"
ISLANDS = "islands"
LOCK = "lock"
EVENTS = "events"
DATA = "data"

_RECORD = re.compile(rf"{RECORDS}/(\d{{6,}})-(\d{{8,}})\.json")
_LOCK = re.compile(rf"{LOCK}/(\d{{6,}})\.json")


def record_name(epoch: int, seq: int) -> str:
    """A record of the synchronizer: `state/<epoch>-<seq>.json`."""
    return f"{RECORDS}/{epoch:06d}-{seq:08d}.json"


def parse_record_name(name: str) -> tuple[int, int] | None:
    """Epoch and seq of a record's name, None for another name."""
    match = _RECORD.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def snapshot_name(fragment: int, version: int, epoch: int) -> str:
    """The whole outer state of a fragment (theta, momentum, published) at a version."""
    return f"{TENSORS}/f{fragment}-v{version:08d}-e{epoch:06d}.snapshot.safetensors"


def delta_name(fragment: int, version: int, epoch: int) -> str:
    """The merged delta that led to a version."""
    return f"{TENSORS}/f{fragment}-v{version:08d}-e{epoch:06d}.delta.safetensors"


def lock_name(epoch: int) -> str:
    """The file that won an epoch of the run lock."""
    return f"{LOCK}/{epoch:06d}.json"


def beat_name(epoch: int) -> str:
    """The counter that the holder of an epoch raises."""
    return f"{LOCK}/{epoch:06d}.beat"


def parse_lock_name(name: str) -> int | None:
    """The epoch of a lock file's name, None for another name."""
    match = _LOCK.fullmatch(name)
    return int(match[1]) if match else None


def island_folder(island: str) -> str:
    """The folder of an island's checkpoints."""
    return f"{ISLANDS}/{island}"
