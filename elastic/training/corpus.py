"""Tokenise a corpus once, and open it everywhere.

`prepare` streams the sources through the tokenizer into shards, in memory that does not depend on the size
of the corpus, and publishes the finished folder under a key of everything that decides its content. Nothing
is visible under that name before it is complete, so a killed preparation is simply done again, and two at
the same time do no harm. `Corpus.open` maps the shards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Generator
from pathlib import Path

from elastic.base.config import Data
from elastic.base.errors import DataError, ElasticError, IntegrityError, RunFolderError, StorageError
from elastic.training.corpus_info import FORMAT, CorpusInfo
from elastic.training.ingest import Ingest, Progress
from elastic.training.listing import Listing, check_listing, list_sources
from elastic.training.manifest import Manifest, hash_of
from elastic.training.publish import publish, work_folder, write_durably
from elastic.training.shards import Layout, Sequences, check_hashes, check_sizes, damaged
from elastic.training.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, token_dtype

INFO_NAME = "corpus.json"
MANIFEST_NAME = "manifest.json"


def _silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


def prepare(
    data: Data,
    folder: Path | str,
    progress: Progress = _silent,
    *,
    batch_tokens: int = 1 << 20,
    shard_tokens: int = 1 << 26,
) -> CorpusInfo:
    """Tokenise the sources into `<folder>/<key>`, unless that is already there; see `Corpus.open`.

    `batch_tokens` bounds the memory of each part's write buffer, `shard_tokens` the size of a file.
    Raises DataError for sources that cannot be read as asked, IntegrityError when a finished corpus is
    damaged, RunFolderError or StorageError when `folder` cannot be written or is full.
    """
    folder = Path(folder)
    tokenizer = load_tokenizer(data.tokenizer)
    listing = list_sources(data)
    key = corpus_key(data, tokenizer, listing.manifest)
    target = folder / key
    if (target / INFO_NAME).exists():
        return Corpus.open(target).info
    check_listing(listing, data)
    batch_sequences = max(1, batch_tokens // data.seq_len)
    batches_per_shard = max(1, shard_tokens // (batch_sequences * data.seq_len))
    dtype = token_dtype(tokenizer.vocab_size)
    layout = Layout(data.seq_len, dtype.name, batch_sequences, batches_per_shard)
    with _clear_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        require_space(space_needed(listing, tokenizer), shutil.disk_usage(folder).free, folder)
    with _clear_disk_errors(folder), work_folder(folder, key) as work:
        info, manifest = Ingest(data, tokenizer, layout, work, progress).run(listing, key)
        write_durably(work / MANIFEST_NAME, json.dumps(manifest.to_json(), indent=1))
        write_durably(work / INFO_NAME, json.dumps(info.to_json(), indent=1))
        publish(work, target, INFO_NAME)
    return Corpus.open(target).info


def corpus_key(data: Data, tokenizer: Tokenizer, manifest: Manifest) -> str:
    """Hash of what decides the content of a corpus: 16 hexadecimal digits."""
    return hash_of(
        {
            "format": FORMAT,
            "files": manifest.listing_hash,
            "tokenizer": tokenizer.fingerprint,
            "seq_len": data.seq_len,
            "text_column": data.text_column,
            "max_document_mb": data.max_document_mb,
            "on_bad_file": data.on_bad_file,
        }
    )[:16]


class Corpus:
    """A prepared corpus. Pickles by its folder's name; maps are opened again in each process."""

    def __init__(self, folder: Path, info: CorpusInfo) -> None:
        self.folder, self.info = folder, info
        self.train = Sequences(folder, info.train.shards, info.layout)
        self.validation = Sequences(folder, info.validation.shards, info.layout)

    @classmethod
    def open(cls, folder: Path | str) -> Corpus:
        """Open the folder `<where it was prepared>/<key>` and check that all shards have their sizes.

        Raises DataError when there is no complete corpus, IntegrityError naming a damaged file.
        """
        folder = Path(folder)
        path = folder / INFO_NAME
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise DataError(
                "there is no prepared corpus here",
                where=str(folder),
                saw=f"no {INFO_NAME}",
                fix="run the same command again: the corpus is made from the sources",
            ) from error
        except ValueError as error:
            raise damaged(path, str(error)) from error
        if value.get("format") != FORMAT:
            raise IntegrityError(
                "the prepared corpus has another format",
                where=str(path),
                saw=f"format {value.get('format')}, this version reads {FORMAT}",
                fix=f"delete {folder} and run the same command",
            )
        info = CorpusInfo.from_json(value)
        check_sizes(folder, info.train.shards + info.validation.shards)
        return cls(folder, info)

    def manifest(self) -> Manifest:
        """The files the corpus was made of. Raises IntegrityError when it is not what was written."""
        path = self.folder / MANIFEST_NAME
        try:
            manifest = Manifest.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise damaged(path, f"{type(error).__name__}: {error}") from error
        if manifest.hash != self.info.manifest_hash:
            raise damaged(path, f"hash {manifest.hash} instead of {self.info.manifest_hash}")
        return manifest

    def verify(self) -> None:
        """Read every shard and the manifest; raises IntegrityError naming the file that is not as written."""
        check_hashes(self.folder, self.info.train.shards + self.info.validation.shards)
        self.manifest()


# ------------------------------------------------------------------------------------- disk space


def space_needed(listing: Listing, tokenizer: Tokenizer) -> int:
    """A lower bound of the bytes a corpus takes: what plain text surely becomes."""
    plain = sum(
        file.size_bytes
        for file in listing.files
        if file.format.kind == "text" and file.format.compression is None
    )
    bytes_per_token = 1 if isinstance(tokenizer, ByteTokenizer) else 8
    return plain // bytes_per_token * token_dtype(tokenizer.vocab_size).itemsize


def require_space(needed_bytes: int, free_bytes: int, folder: Path) -> None:
    """Raise StorageError when the tokenised corpus cannot fit."""
    if needed_bytes > free_bytes:
        raise _disk_full(folder, f"{free_bytes} bytes free, at least {needed_bytes} needed")


@contextlib.contextmanager
def _clear_disk_errors(folder: Path) -> Generator[None, None, None]:
    """Errors of writing, said plainly; those of reading the sources are not OSErrors any more."""
    try:
        yield
    except OSError as error:
        raise _write_error(folder, error) from error


def _write_error(folder: Path, error: OSError) -> ElasticError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _disk_full(folder, str(error))
    return RunFolderError(
        "the folder of the tokenised corpus cannot be written",
        where=str(folder),
        saw=f"{type(error).__name__}: {error}",
        fix="set data.cache_folder to a local folder that can be written",
    )


def _disk_full(folder: Path, saw: str) -> StorageError:
    return StorageError(
        "the disk is too small for the tokenised corpus",
        where=str(folder),
        saw=saw,
        fix="free space or set data.cache_folder to a larger disk, then run the same command",
    )
