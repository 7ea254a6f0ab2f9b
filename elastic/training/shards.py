"""Sequences on disk: pack tokens into Arrow IPC shards, and take them back through memory maps.

A part of a corpus ("train" or "validation") is one long stream of tokens. Sequence i holds the tokens from
i * seq_len through (i + 1) * seq_len, one more than seq_len, so that every token but the first is predicted
exactly once. A shard is an Arrow IPC file with one column `tokens` of fixed-size lists, in record batches of
equal size: the place of a sequence follows from its number alone.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from elastic.base.errors import IntegrityError


@dataclass(frozen=True)
class Layout:
    """How the sequences of a corpus lie in its shards."""

    seq_len: int
    token_dtype: str
    batch_sequences: int
    """Sequences of every record batch but the last of a part."""
    batches_per_shard: int

    @property
    def schema(self) -> pa.Schema:
        """One column, `tokens`: lists of seq_len + 1 ids."""
        return pa.schema([("tokens", pa.list_(pa.from_numpy_dtype(self.token_dtype), self.seq_len + 1))])

    @property
    def batch_bytes(self) -> int:
        """Bytes of a full record batch, without its small header."""
        return self.batch_sequences * (self.seq_len + 1) * np.dtype(self.token_dtype).itemsize


@dataclass(frozen=True)
class Shard:
    """One file."""

    name: str
    sequences: int
    size_bytes: int
    sha256: str


class SequenceWriter:
    """Packs the documents of one part; holds one record batch in memory."""

    def __init__(self, folder: Path, part: str, layout: Layout) -> None:
        self._folder, self._part, self._layout = folder, part, layout
        self._tokens = np.empty(layout.batch_sequences * layout.seq_len + 1, dtype=layout.token_dtype)
        self._filled = 0
        self._shard: _OpenShard | None = None
        self.shards: list[Shard] = []
        self.tokens = 0
        self.sequences = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append token ids [n] of the layout's type."""
        self.tokens += len(tokens)
        while len(tokens):
            room = len(self._tokens) - self._filled
            piece, tokens = tokens[:room], tokens[room:]
            self._tokens[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == len(self._tokens):
                self._write(self._layout.batch_sequences)

    def close(self) -> int:
        """Write the rest; returns how many tokens at the end fill no sequence and are dropped."""
        whole = max(0, self._filled - 1) // self._layout.seq_len
        if whole:
            self._write(whole)
        if self._shard is not None:
            self._end_shard(self._shard)
        return max(0, self._filled - 1) if self.sequences else self._filled

    def abandon(self) -> None:
        """Close what is open after an error."""
        if self._shard is not None:
            self._shard.abandon()

    def _write(self, sequences: int) -> None:
        """Write the first `sequences` and keep the rest, of which the first token was the last target."""
        length = self._layout.seq_len
        windows = np.lib.stride_tricks.sliding_window_view(self._tokens[: sequences * length + 1], length + 1)
        values = pa.array(windows[::length].reshape(-1))
        if self._shard is None:
            name = f"{self._part}-{len(self.shards):05d}.arrow"
            self._shard = _OpenShard(self._folder / name, self._layout.schema)
        self._shard.write(pa.FixedSizeListArray.from_arrays(values, length + 1))
        self.sequences += sequences
        if self._shard.batches == self._layout.batches_per_shard:
            self._end_shard(self._shard)
        rest = self._tokens[sequences * length : self._filled].copy()
        self._tokens[: len(rest)] = rest
        self._filled = len(rest)

    def _end_shard(self, shard: _OpenShard) -> None:
        self.shards.append(shard.close())
        self._shard = None


class _OpenShard:
    """A shard that is being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._schema = path, schema
        self._file = _HashingFile(path)
        self._writer = pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), schema)
        self.batches = self._sequences = 0

    def write(self, sequences: pa.FixedSizeListArray) -> None:
        """Append one record batch."""
        self._writer.write_batch(pa.record_batch([sequences], schema=self._schema))
        self.batches += 1
        self._sequences += len(sequences)

    def close(self) -> Shard:
        """Write the footer and make the file durable."""
        self._writer.close()
        self._file.sync()
        self._file.close()
        size = self._path.stat().st_size
        return Shard(self._path.name, self._sequences, size, self._file.digest.hexdigest())

    def abandon(self) -> None:
        """Let go of the file."""
        self._file.close()


class _HashingFile:
    """A file for pyarrow to write to; its SHA-256 is computed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.digest = hashlib.sha256()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._file.closed

    def write(self, data: bytes) -> int:
        """All of `data`."""
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Give everything to the operating system."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Sequences:
    """The sequences of one part, read through memory maps; pickles as its description alone.

    Maps are opened when they are first needed, once per process, so that this object can be handed to
    worker processes.
    """

    def __init__(self, folder: Path, shards: tuple[Shard, ...], layout: Layout) -> None:
        self._folder, self._shards, self._layout = folder, shards, layout
        self._length = sum(shard.sequences for shard in shards)
        self._readers: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self._batches: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Number of sequences."""
        return self._length

    def __getstate__(self) -> dict[str, object]:
        """Without the maps."""
        return {**self.__dict__, "_readers": {}, "_batches": {}}

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Sequences by number: ids [n] integers -> tokens [n, seq_len + 1] int64.

        Raises IndexError when an id is outside 0..len-1.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise IndexError(f"ids must be a list of integers, got {ids.dtype} of shape {ids.shape}")
        if ids.size and not (ids.min() >= 0 and ids.max() < self._length):
            raise IndexError(f"ids must be in 0..{self._length - 1}, got {ids.min()}..{ids.max()}")
        tokens = np.empty((len(ids), self._layout.seq_len + 1), dtype=np.int64)
        batches, rows = np.divmod(ids.astype(np.int64), self._layout.batch_sequences)
        for batch in np.unique(batches):
            chosen = batches == batch
            tokens[chosen] = self._batch(int(batch))[rows[chosen]]
        return tokens

    def _batch(self, number: int) -> np.ndarray:
        """Record batch `number` of the part as [sequences, seq_len + 1], a view of the file."""
        if number not in self._batches:
            shard, index = divmod(number, self._layout.batches_per_shard)
            if shard not in self._readers:
                path = self._folder / self._shards[shard].name
                try:
                    self._readers[shard] = pa.ipc.open_file(pa.memory_map(str(path)))
                except (OSError, pa.ArrowInvalid) as error:
                    raise damaged(path, str(error)) from error
            column = self._readers[shard].get_batch(index).column(0)
            values = column.flatten().to_numpy(zero_copy_only=True)
            self._batches[number] = values.reshape(-1, self._layout.seq_len + 1)
        return self._batches[number]


def check_sizes(folder: Path, shards: tuple[Shard, ...]) -> None:
    """Raise IntegrityError when a shard is missing or has another size than it was written with."""
    for shard in shards:
        path = folder / shard.name
        size = path.stat().st_size if path.is_file() else None
        if size != shard.size_bytes:
            raise damaged(path, f"{'nothing' if size is None else size} instead of {shard.size_bytes} bytes")


def check_hashes(folder: Path, shards: tuple[Shard, ...]) -> None:
    """Raise IntegrityError when the bytes of a shard are not those that were written."""
    for shard in shards:
        digest = hashlib.sha256()
        with (folder / shard.name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != shard.sha256:
            raise damaged(folder / shard.name, f"SHA-256 {digest.hexdigest()} instead of {shard.sha256}")


def damaged(path: Path, saw: str) -> IntegrityError:
    """The error for a shard that is not what was written."""
    return IntegrityError(
        "a file of the tokenised corpus is damaged",
        where=str(path),
        saw=saw,
        fix=f"delete {path.parent} and run the same command: it is made again from the sources",
    )
