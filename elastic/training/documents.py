"""What readers share: a document, what to read, a tracked file, and the errors that name file and row.

A file that cannot be read as asked raises `BadFileError`, for which `data.on_bad_file` decides. A file
that is no longer what was listed raises `DataError`, since half of an old and half of a new one must
never be mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from elastic.base.errors import DataError, ElasticError, StorageError
from elastic.training.sources import SourceFile


class BadFileError(DataError):
    """One file cannot be read as asked; `data.on_bad_file` decides whether that stops the run.

    Example: `part-3.jsonl.gz` ends in the middle of its compressed stream.
    """


@dataclass(frozen=True)
class Document:
    """One text and where it stands in its file."""

    text: str
    utf8: bytes
    row: int
    """Line of JSON lines or row of a table, counted from 1; 1 for a text file."""


@dataclass
class Skipped:
    """Rows of a file that hold no text."""

    null: int = 0
    empty: int = 0


@dataclass(frozen=True)
class ReadOptions:
    """What of `Data` concerns reading."""

    text_column: str
    max_document_bytes: int


class TrackedFile:
    """A file's raw bytes for pyarrow: counts what was read, turns every client's errors into OSError."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self.bytes_read = 0
        self.failure: Exception | None = None
        """The error of the file system itself, as opposed to one in the bytes."""

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._raw.closed

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes."""
        try:
            data = self._raw.read(size)
        except Exception as error:  # each cloud's client has its own tree of errors
            self.failure = error
            raise OSError(f"{type(error).__name__}: {error}") from error
        self.bytes_read += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as of io."""
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return self._raw.tell()

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


def open_tracked(file: SourceFile) -> TrackedFile:
    """Open a file for reading. Raises OSError whatever the file system raises."""
    try:
        return TrackedFile(file.open())
    except OSError:
        raise
    except Exception as error:  # each cloud's client has its own tree of errors
        raise OSError(f"{type(error).__name__}: {error}") from error


def bad_file(file: SourceFile, what: str, saw: str, fix: str, *, row: int | None = None) -> BadFileError:
    """The error for a file or one row of it; `fix` is completed by the way around it."""
    where = file.name if row is None else f"{file.name}:{row}"
    return BadFileError(what, where=where, saw=saw, fix=f"{fix}, or set data.on_bad_file: skip")


def too_large(
    file: SourceFile, size_bytes: int, options: ReadOptions, *, row: int | None = None, part: str = "document"
) -> BadFileError:
    """The error for a document or line above the limit."""
    return bad_file(
        file,
        f"the {part} is larger than data.max_document_mb",
        f"{size_bytes} bytes or more, allowed {options.max_document_bytes}",
        "raise the limit, or cut the text into several documents (.jsonl holds one a line)",
        row=row,
    )


def not_text(file: SourceFile, row: int, column: str, saw: str) -> BadFileError:
    """The error for a row whose text is something else."""
    return bad_file(file, f"'{column}' is not text", saw, "set data.text_column to a key of text", row=row)


def missing_column(file: SourceFile, column: str, columns: list[str]) -> DataError:
    """The error for a text column that a file does not have."""
    return DataError(
        f"there is no column '{column}'",
        where=file.name,
        saw="the columns " + ", ".join(columns[:20]) if columns else "no columns",
        fix="set data.text_column to the column that holds the text (dots reach into nested records)",
    )


def changed(file: SourceFile, change: str) -> DataError:
    """The error for a file that is not what was listed."""
    return DataError(
        "the file changed after it was listed",
        where=file.name,
        saw=change,
        fix="let nothing write to the sources while they are read, then run the same command",
    )


def explain(file: SourceFile, tracked: TrackedFile | None, error: Exception) -> ElasticError:
    """What an error in reading means: the file changed, storage failed, or the file is bad."""
    change = file.change()
    if change:
        return changed(file, change)
    if isinstance(error, BadFileError):
        return error
    failure = tracked.failure if tracked else error  # without a tracked file, opening it failed
    if failure is not None and not file.is_local and not isinstance(failure, PermissionError):
        return StorageError(
            "the source could not be read",
            where=file.name,
            saw=f"{type(failure).__name__}: {failure}",
            fix="check the connection and the credentials, then run the same command",
        )
    return bad_file(
        file, "the file cannot be read", f"{type(error).__name__}: {error}", "replace or remove the file"
    )
