"""Text to token ids and back: bytes (built in), or `tokenizers` and `tiktoken` from a local file.

Text is always plain: a document that spells out a special token gets the tokens of its characters, never
the special token itself. The end of a document is put in by the corpus, not here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from elastic.base import config
from elastic.base.errors import DataError


class Tokenizer(Protocol):
    """What the corpus and the export need of a tokenizer; a Protocol so that libraries stay optional."""

    vocab_size: int
    """Ids are below this."""
    end_of_document: int
    """Id put after every document."""
    fingerprint: str
    """Hash of all that decides the ids; a corpus is bound to it."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids [n] of `token_dtype(vocab_size)`, one array per text, no end of document added."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; the end of document is left out, broken UTF-8 becomes U+FFFD."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def load_tokenizer(cfg: config.Tokenizer) -> Tokenizer:
    """The tokenizer of `data.tokenizer`.

    Raises DataError when its file is missing or broken, its end-of-document token is unknown, or its
    library is not installed.
    """
    if isinstance(cfg, config.BytesTokenizer):
        return ByteTokenizer()
    if isinstance(cfg, config.TokenizersTokenizer):
        return HuggingFaceTokenizer(cfg)
    return TiktokenTokenizer(cfg)


class ByteTokenizer:
    """One token per UTF-8 byte (0-255), and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes-1"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        array = np.asarray(ids)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`."""

    def __init__(self, cfg: config.TokenizersTokenizer) -> None:
        content = _read(cfg.file)
        try:
            import tokenizers
        except ImportError as error:
            raise _missing_library("tokenizers", "hf") from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise _broken(cfg.file, error, "give a tokenizer.json of the tokenizers library") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text stays text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if cfg.end_of_document not in vocabulary:
            added = self._tokenizer.get_added_tokens_decoder()
            raise DataError(
                f"the tokenizer has no token '{cfg.end_of_document}'",
                where=f"data.tokenizer.end_of_document, {cfg.file}",
                saw="special tokens " + (", ".join(token.content for token in added.values()) or "none"),
                fix="set data.tokenizer.end_of_document to one of them",
            )
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.end_of_document: int = vocabulary[cfg.end_of_document]
        self.fingerprint = _fingerprint("tokenizers", content, cfg.end_of_document)
        self._dtype = token_dtype(self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        kept = [int(i) for i in ids if i != self.end_of_document]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


class TiktokenTokenizer:
    """A rank file: lines of base64 token and rank.

    Parsed here, because tiktoken's own loader keeps copies by path in a temporary folder and would not see
    that the file changed.
    """

    def __init__(self, cfg: config.TiktokenTokenizer) -> None:
        content = _read(cfg.file)
        try:
            import tiktoken
        except ImportError as error:
            raise _missing_library("tiktoken", "tiktoken") from error
        ranks = _parse_ranks(cfg.file, content)
        self.end_of_document = max(ranks.values()) + 1
        self.vocab_size = self.end_of_document + 1
        try:
            self._encoding: Any = tiktoken.Encoding(
                name=Path(cfg.file).stem,
                pat_str=cfg.pattern,
                mergeable_ranks=ranks,
                special_tokens={cfg.end_of_document: self.end_of_document},
            )
        except ValueError as error:
            raise DataError(
                "the pattern or the ranks do not fit tiktoken",
                where=f"data.tokenizer.pattern, {cfg.file}",
                saw=str(error),
                fix="copy the pattern as the model's authors give it",
            ) from error
        self.fingerprint = _fingerprint("tiktoken", content, cfg.pattern, cfg.end_of_document)
        self._dtype = token_dtype(self.vocab_size)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See `Tokenizer`."""
        return [np.array(ids, dtype=self._dtype) for ids in self._encoding.encode_ordinary_batch(list(texts))]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """See `Tokenizer`."""
        return self._encoding.decode([int(i) for i in ids if i != self.end_of_document], errors="replace")


def _parse_ranks(file: str, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    fix = "give a .tiktoken file with lines of base64 token and rank"
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise _broken(f"{file}:{number}", error, fix) from error
    if not ranks:
        raise _broken(file, ValueError("no ranks"), fix)
    return ranks


def _read(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise DataError(
            "the tokenizer's file cannot be read",
            where="data.tokenizer.file",
            saw=f"{file}: {error.strerror}",
            fix="download the file first and give its local path",
        ) from error


def _broken(where: str, error: Exception, fix: str) -> DataError:
    return DataError(
        "the tokenizer's file is broken", where=where, saw=f"{type(error).__name__}: {error}", fix=fix
    )


def _missing_library(library: str, extra: str) -> DataError:
    return DataError(
        f"the library '{library}' is not installed",
        where="data.tokenizer.kind",
        saw=f"no module named {library}",
        fix=f"pip install 'elastic-islands[{extra}]'",
    )


def _fingerprint(kind: str, content: bytes, *options: str) -> str:
    digest = hashlib.sha256(content)
    for option in options:
        digest.update(b"\0" + option.encode())
    return f"{kind}-{digest.hexdigest()}"
