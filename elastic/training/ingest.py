"""Read every source file once, tokenise its documents, and write them to the shards of their part.

In memory are one document or about a megabyte of small ones, and one write buffer for each part.
"""

from __future__ import annotations

import dataclasses
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from elastic.base.config import Data
from elastic.base.errors import DataError
from elastic.training.corpus_info import CorpusInfo, PartInfo
from elastic.training.documents import BadFileError, Skipped
from elastic.training.listing import Listing, empty_corpus, read_options
from elastic.training.manifest import FileEntry, Manifest, TextHash
from elastic.training.readers import read_documents
from elastic.training.shards import Layout, SequenceWriter
from elastic.training.sources import SourceFile
from elastic.training.split import PARTS, Part
from elastic.training.tokenizer import Tokenizer

PROGRESS_BYTES = 4 << 20
"""Progress is told at least this often, and after each file."""
ENCODE_CHARACTERS = 1 << 20
"""Text given to the tokenizer at once, unless one document is longer."""

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); in the stage "reading" these are bytes of the source files."""

Encoded = tuple[Part, np.ndarray, int]
"""A document's part, its token ids with the end of document, its UTF-8 bytes."""


class Ingest:
    """Reads every file once, in order, into one writer for each part."""

    def __init__(
        self, data: Data, tokenizer: Tokenizer, layout: Layout, work: Path, progress: Progress
    ) -> None:
        self._data, self._tokenizer, self._layout = data, tokenizer, layout
        self._work, self._progress = work, progress
        self._writers = {part: SequenceWriter(work, part, layout) for part in PARTS}
        self._documents = dict.fromkeys(PARTS, 0)
        self._bytes = dict.fromkeys(PARTS, 0)
        self._end = np.array([tokenizer.end_of_document], dtype=layout.token_dtype)
        self._told = 0

    def run(self, listing: Listing, key: str) -> tuple[CorpusInfo, Manifest]:
        """Write all shards. Raises DataError when a part does not fill a single sequence."""
        entries: list[FileEntry] = []
        total, done = listing.manifest.size_bytes, 0
        self._progress("reading", 0, total)
        try:
            for file, entry in zip(listing.files, listing.manifest.files, strict=True):
                entries.append(self._read(file, entry, listing, done, total))
                done += file.size_bytes
                self._tell(done, total)
            manifest = dataclasses.replace(listing.manifest, files=tuple(entries))
            parts = {part: self._finish(part, manifest) for part in PARTS}
        except BaseException:
            for writer in self._writers.values():
                writer.abandon()
            raise
        info = CorpusInfo(
            key=key,
            vocab_size=self._tokenizer.vocab_size,
            end_of_document=self._tokenizer.end_of_document,
            tokenizer=self._tokenizer.fingerprint,
            manifest_hash=manifest.hash,
            layout=self._layout,
            train=parts["train"],
            validation=parts["validation"],
            files=len(entries),
            skipped_files=tuple((entry.name, entry.problem) for entry in entries if entry.problem)[:100],
            null_rows=sum(entry.null_rows for entry in entries),
            empty_documents=sum(entry.empty_documents for entry in entries),
            notes=tuple(manifest.notes()),
        )
        return info, manifest

    def _read(self, file: SourceFile, entry: FileEntry, listing: Listing, done: int, total: int) -> FileEntry:
        skipped, digest = Skipped(), TextHash()
        documents = 0

        def pieces() -> Iterator[tuple[Part, str]]:
            nonlocal documents
            for document in read_documents(
                file,
                read_options(self._data),
                skipped,
                lambda read: self._tell(done + min(read, file.size_bytes), total, file),
            ):
                digest.add(document.utf8)
                documents += 1
                yield from listing.manifest.split.divide(file, entry.part, document)

        encoded = self._encode(pieces())
        if self._data.on_bad_file == "skip":  # a bad file must leave nothing behind
            encoded = _staged(encoded, self._work, np.dtype(self._layout.token_dtype))
        try:
            for part, tokens, num_bytes in encoded:
                self._writers[part].add(tokens)
                self._documents[part] += 1
                self._bytes[part] += num_bytes
        except BadFileError as error:
            if self._data.on_bad_file == "stop":
                raise
            return dataclasses.replace(entry, problem=f"{error.where}: {error.what} ({error.saw})")
        return dataclasses.replace(
            entry,
            text_sha256=digest.hexdigest(),
            documents=documents,
            null_rows=skipped.null,
            empty_documents=skipped.empty,
        )

    def _encode(self, pieces: Iterator[tuple[Part, str]]) -> Iterator[Encoded]:
        """Tokenise some documents at a time."""
        waiting: list[tuple[Part, str]] = []
        size = 0
        for part, text in pieces:
            if text:
                waiting.append((part, text))
                size += len(text)
            if size >= ENCODE_CHARACTERS:
                yield from self._encode_now(waiting)
                waiting, size = [], 0
        if waiting:
            yield from self._encode_now(waiting)

    def _encode_now(self, waiting: list[tuple[Part, str]]) -> Iterator[Encoded]:
        ids = self._tokenizer.encode_batch([text for _, text in waiting])
        for (part, text), tokens in zip(waiting, ids, strict=True):
            yield part, np.concatenate([tokens, self._end]), len(text.encode("utf-8"))

    def _finish(self, part: Part, manifest: Manifest) -> PartInfo:
        writer = self._writers[part]
        dropped = writer.close()
        if not any(self._documents.values()):
            problems = [file.problem for file in manifest.files if file.problem]
            raise empty_corpus("data.sources", problems, len(manifest.files))
        if not writer.sequences:
            raise DataError(
                f"the {'training' if part == 'train' else 'validation'} part does not fill one sequence",
                where="data",
                saw=f"{writer.tokens} tokens, a sequence holds {self._layout.seq_len + 1}; {manifest.split}",
                fix="give more text, a smaller data.seq_len, another data.validation_share, "
                "or name the held-out files in data.validation_sources",
            )
        return PartInfo(
            documents=self._documents[part],
            bytes=self._bytes[part],
            tokens=writer.tokens,
            sequences=writer.sequences,
            dropped_tokens=dropped,
            shards=tuple(writer.shards),
        )

    def _tell(self, done: int, total: int, file: SourceFile | None = None) -> None:
        """Progress; inside a file only every PROGRESS_BYTES."""
        if file is None or done - self._told >= PROGRESS_BYTES:
            self._told = done
            self._progress("reading", min(done, total), total)


def _staged(encoded: Iterator[Encoded], folder: Path, dtype: np.dtype) -> Iterator[Encoded]:
    """The same items, but none before the last was made without an error; they wait on the disk."""
    header = struct.Struct("<BQQ")
    with tempfile.TemporaryFile(dir=folder) as spool:
        for part, tokens, num_bytes in encoded:
            spool.write(header.pack(PARTS.index(part), len(tokens), num_bytes))
            spool.write(tokens.astype(dtype, copy=False).tobytes())
        spool.seek(0)
        while head := spool.read(header.size):
            part_index, num_tokens, num_bytes = header.unpack(head)
            yield PARTS[part_index], np.frombuffer(spool.read(num_tokens * dtype.itemsize), dtype), num_bytes
