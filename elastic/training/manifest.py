"""The manifest: which files a corpus was made of, and what they held.

Listed first, completed with content hashes while the files are read, stored with the corpus, and compared
with the sources later (`elastic.training.listing`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elastic.training.sources import Ignored
from elastic.training.split import Part, Split


@dataclass(frozen=True)
class FileEntry:
    """One file of a corpus."""

    name: str
    size_bytes: int
    version: str
    """etag or modification time at the time of reading."""
    part: Part | Literal["both"]
    text_sha256: str = ""
    """Hash over its documents, see `TextHash`; empty until it was read."""
    documents: int = 0
    null_rows: int = 0
    empty_documents: int = 0
    problem: str = ""
    """Why the file was skipped."""


@dataclass(frozen=True)
class Manifest:
    """All files of a corpus, sorted by name, and what was left out."""

    split: Split
    files: tuple[FileEntry, ...]
    ignored: tuple[Ignored, ...] = ()
    duplicates: tuple[str, ...] = ()
    """Names of files that two sources hold; read once."""

    @property
    def hash(self) -> str:
        """SHA-256 over names, sizes and content hashes: the same on every machine with the same files."""
        return hash_of([[file.name, file.size_bytes, file.text_sha256] for file in self.files])

    @property
    def listing_hash(self) -> str:
        """SHA-256 over names, sizes, versions and parts, known before anything is read."""
        files = [[file.name, file.size_bytes, file.version, file.part] for file in self.files]
        return hash_of([self.split.rule, self.split.share, files])

    @property
    def size_bytes(self) -> int:
        """Bytes of all files as they lie."""
        return sum(file.size_bytes for file in self.files)

    def notes(self) -> list[str]:
        """What a person should know, one sentence each."""
        notes = [f"{len(self.files)} files, {self.size_bytes} bytes; {self.split}"]
        notes += [named(i.count, f"ignored, {i.reason}", i.names) for i in self.ignored]
        if self.duplicates:
            notes.append(named(len(self.duplicates), "listed twice and read once", self.duplicates))
        problems = [f"{file.name} ({file.problem})" for file in self.files if file.problem]
        if problems:
            notes.append(named(len(problems), "skipped, cannot be read", problems))
        nulls = sum(file.null_rows for file in self.files)
        empty = sum(file.empty_documents for file in self.files)
        if nulls or empty:
            notes.append(f"{nulls} rows without text and {empty} empty documents were skipped")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dictionaries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        return cls(
            split=Split(**value["split"]),
            files=tuple(FileEntry(**file) for file in value["files"]),
            ignored=tuple(Ignored(**ignored) for ignored in value["ignored"]),
            duplicates=tuple(value["duplicates"]),
        )


class TextHash:
    """SHA-256 over documents: for each, its length in bytes (8 bytes, little-endian), then its UTF-8.

    A hash of the text rather than of the file: it needs no second pass over a table of which only one
    column is read, and it stays the same when a file is compressed or copied.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, utf8: bytes) -> None:
        """One more document."""
        self._digest.update(len(utf8).to_bytes(8, "little"))
        self._digest.update(utf8)

    def hexdigest(self) -> str:
        """The hash so far."""
        return self._digest.hexdigest()


def named(count: int, what: str, names: Sequence[str]) -> str:
    """A count with the first names."""
    shown = ", ".join(names[:5])
    return f"{count} {what}: {shown}" + (", ..." if count > 5 else "")


def hash_of(value: Any) -> str:
    """SHA-256 of a value as compact JSON."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
