"""What is known of a prepared corpus: the content of its `corpus.json`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from elastic.training.shards import Layout, Shard

FORMAT = 1


@dataclass(frozen=True)
class PartInfo:
    """What one part of a corpus holds."""

    documents: int
    bytes: int
    """UTF-8 bytes of its documents."""
    tokens: int
    """With one end of document each."""
    sequences: int
    dropped_tokens: int
    """At the end, too few for a sequence."""
    shards: tuple[Shard, ...]

    @property
    def tokens_per_byte(self) -> float:
        """Turns a mean loss per token into one per byte of text."""
        return self.tokens / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class CorpusInfo:
    """All about a corpus but its tokens and its files."""

    key: str
    """Hash of the sources' listing and of every option that decides the tokens; name of the folder."""
    vocab_size: int
    end_of_document: int
    tokenizer: str
    """Fingerprint of the tokenizer."""
    manifest_hash: str
    """SHA-256 over names, sizes and content hashes of the sources."""
    layout: Layout
    train: PartInfo
    validation: PartInfo
    files: int
    skipped_files: tuple[tuple[str, str], ...]
    """(name, reason) of files that could not be read, under `on_bad_file: skip`; the first 100."""
    null_rows: int
    empty_documents: int
    notes: tuple[str, ...]
    """Sentences for people: what was read, ignored, listed twice, skipped, held out."""
    format: int = FORMAT

    @property
    def seq_len(self) -> int:
        """Tokens a sequence predicts; it holds one more."""
        return self.layout.seq_len

    @property
    def documents(self) -> int:
        """Documents of both parts."""
        return self.train.documents + self.validation.documents

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of both parts."""
        return self.train.bytes + self.validation.bytes

    @property
    def tokens(self) -> int:
        """Tokens of both parts."""
        return self.train.tokens + self.validation.tokens

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dictionaries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CorpusInfo:
        """The inverse of `to_json`."""
        value = dict(value)
        for part in ("train", "validation"):
            fields = dict(value[part])
            fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
            value[part] = PartInfo(**fields)
        value["layout"] = Layout(**value["layout"])
        value["skipped_files"] = tuple((name, reason) for name, reason in value["skipped_files"])
        value["notes"] = tuple(value["notes"])
        return cls(**value)
