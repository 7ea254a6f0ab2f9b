"""From one file to its documents, streaming: text, source code and JSON lines (tables are in `tables`).

Nothing but one document and one block is held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from elastic.base.errors import DataError
from elastic.training.documents import (
    BadFileError,
    Document,
    ReadOptions,
    Skipped,
    TrackedFile,
    bad_file,
    changed,
    explain,
    missing_column,
    not_text,
    open_tracked,
    too_large,
)
from elastic.training.sources import SourceFile
from elastic.training.tables import check_table, read_table

BLOCK_BYTES = 1 << 20
CHECKED_LINES = 100
"""A key that none of the first lines has is a mistake; one that the first line lacks is not."""

_FAULTS = (OSError, ValueError, EOFError, pa.ArrowException, BadFileError)


def read_documents(
    file: SourceFile,
    options: ReadOptions,
    skipped: Skipped,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Iterator[Document]:
    """The documents of a file in order, without null and blank ones, which `skipped` counts.

    `on_bytes` is told how many raw bytes were read so far, after each document. Raises BadFileError for
    damage, invalid UTF-8, rows that are not text and documents above the limit, with file and row;
    DataError if the text column is missing or the file changed since it was listed; StorageError when
    the file system fails.
    """
    tracked: TrackedFile | None = None
    try:
        tracked = open_tracked(file)
        for document in _READERS[file.format.kind](file, tracked, options, skipped):
            if len(document.utf8) > options.max_document_bytes:
                raise too_large(file, len(document.utf8), options, row=document.row)
            if document.text.strip():
                yield document
            else:
                skipped.empty += 1
            on_bytes(tracked.bytes_read)
    except _FAULTS as error:
        raise explain(file, tracked, error) from error
    finally:
        if tracked is not None:
            tracked.close()
    change = file.change()
    if change:
        raise changed(file, change)


def check_file(file: SourceFile, options: ReadOptions) -> bool:
    """Open a file and look at its schema or first lines; says whether it may hold a document.

    Raises what `read_documents` raises, as far as the beginning (and the footer of a table) shows it.
    """
    tracked: TrackedFile | None = None
    try:
        tracked = open_tracked(file)
        if file.format.kind == "jsonl":
            return _check_jsonl(file, tracked, options)
        if file.format.kind in ("parquet", "arrow"):
            return check_table(file, tracked, options)
        return bool(_decompressed(file, tracked).read(1))
    except _FAULTS as error:
        raise explain(file, tracked, error) from error
    finally:
        if tracked is not None:
            tracked.close()


# ------------------------------------------------------------------------------------- text


def _read_text(
    file: SourceFile, tracked: TrackedFile, options: ReadOptions, skipped: Skipped
) -> Iterator[Document]:
    stream = _decompressed(file, tracked)
    blocks, size = [], 0
    while block := stream.read(BLOCK_BYTES):
        blocks.append(block)
        size += len(block)
        if size > options.max_document_bytes:
            raise too_large(file, size, options)
    text = _decode(file, b"".join(blocks))
    yield Document(text, text.encode("utf-8"), 1)


def _decode(file: SourceFile, utf8: bytes, row: int | None = None) -> str:
    """Text without a byte order mark, which is no part of it."""
    try:
        return utf8.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise bad_file(
            file,
            "the text is not valid UTF-8",
            f"byte 0x{utf8[error.start]:02x} at byte offset {error.start}" + (" of the line" if row else ""),
            "convert the file to UTF-8 (iconv does)",
            row=row,
        ) from error


def _decompressed(file: SourceFile, tracked: TrackedFile) -> Any:
    """The file's bytes, decompressed; pyarrow, unlike zstandard, notices a stream that was cut off."""
    if file.format.compression is None:
        return tracked
    if file.size_bytes == 0:
        raise bad_file(file, "an empty file is not a compressed one", "0 bytes", "replace or remove the file")
    return pa.CompressedInputStream(pa.PythonFile(tracked, mode="r"), file.format.compression)


# ------------------------------------------------------------------------------------- JSON lines


def lookup(record: dict[str, Any], column: str) -> Any:
    """The value of a key: a key of exactly this name, else dots as nesting. None if missing.

    Raises LookupError when something on the way is neither a record nor missing.
    """
    if column in record:
        return record[column]
    parts = column.split(".")
    for cut in range(1, len(parts)):
        head = ".".join(parts[:cut])
        inner = record.get(head)
        if isinstance(inner, dict):
            return lookup(inner, ".".join(parts[cut:]))
        if inner is not None:
            raise LookupError(f"'{head}' is a {type(inner).__name__}, not a record")
    return None


def _read_jsonl(
    file: SourceFile, tracked: TrackedFile, options: ReadOptions, skipped: Skipped
) -> Iterator[Document]:
    for number, record in _records(file, tracked, options):
        text = _text_of(file, number, record, options.text_column)
        if text is None:
            skipped.null += 1
            continue
        try:
            utf8 = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise not_text(file, number, options.text_column, f"half of a surrogate pair: {error}") from error
        yield Document(text, utf8, number)


def _text_of(file: SourceFile, number: int, record: dict[str, Any], column: str) -> str | None:
    try:
        value = lookup(record, column)
    except LookupError as error:
        raise not_text(file, number, column, error.args[0]) from error
    if value is not None and not isinstance(value, str):
        raise not_text(file, number, column, f"{type(value).__name__} {str(value)[:40]}")
    return value


def _records(
    file: SourceFile, tracked: TrackedFile, options: ReadOptions
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank."""
    for number, line in _lines(file, _decompressed(file, tracked), options):
        if len(line) > options.max_document_bytes:
            raise too_large(file, len(line), options, row=number, part="line")
        if not line.strip():
            continue
        text = _decode(file, line, number)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            saw = f"{text[:60]!r}: {error}"
            raise bad_file(file, "the line is not JSON", saw, "correct the line", row=number) from error
        if not isinstance(value, dict):
            fix = f'write lines like {{"{options.text_column}": "..."}}'
            raise bad_file(file, "the line is not a JSON object", text[:60], fix, row=number)
        yield number, value


def _lines(file: SourceFile, stream: Any, options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line without its newline); refuses a line above the limit before all is read."""
    number, pieces, size = 1, [], 0
    while block := stream.read(BLOCK_BYTES):
        first, *others = block.split(b"\n")
        pieces.append(first)
        size += len(first)
        if others:
            yield number, b"".join(pieces)
            for number, line in enumerate(others[:-1], number + 1):  # noqa: B020
                yield number, line
            number, pieces, size = number + 1, [others[-1]], len(others[-1])
        if size > options.max_document_bytes:
            raise too_large(file, size, options, row=number, part="line")
    if size:
        yield number, b"".join(pieces)


def _check_jsonl(file: SourceFile, tracked: TrackedFile, options: ReadOptions) -> bool:
    """The text column must be in one of the first objects."""
    keys: dict[str, None] = {}
    for count, (number, record) in enumerate(_records(file, tracked, options)):
        if count == CHECKED_LINES:
            break
        try:
            value = _text_of(file, number, record, options.text_column)
        except BadFileError as error:  # at the very start it is the option that is wrong, not a row
            if count == 0:
                raise DataError(error.what, where=error.where, saw=error.saw, fix=error.fix) from error
            raise
        if value is not None or options.text_column in record:
            return True
        keys.update(dict.fromkeys(record))
    if keys:
        raise missing_column(file, options.text_column, list(keys))
    return False


_READERS: dict[str, Callable[[SourceFile, TrackedFile, ReadOptions, Skipped], Iterator[Document]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": read_table,
    "arrow": read_table,
}
