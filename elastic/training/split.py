"""Which text is held out for validation: decided by hashes of names, so it never depends on order or seed.

Four rules, the first that fits: `sources` (the user named the held-out sources), `files` (20 files or more:
whole files), `tails` (fewer files, all of them one document each: the end of every file), `documents`
(fewer files that hold many documents: single documents).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.training.documents import Document
from elastic.training.sources import SourceFile

Part = Literal["train", "validation"]
PARTS: tuple[Part, Part] = ("train", "validation")
Rule = Literal["sources", "files", "tails", "documents"]

MIN_FILES = 20
"""Below this, whole files are too coarse to hold out a share of."""


@dataclass(frozen=True)
class Split:
    """How text is divided into the training and the validation part."""

    rule: Rule
    share: float

    def part_of(self, file: SourceFile, named: bool = False) -> Part | Literal["both"]:
        """The part of a whole file; `named` means that it comes from `validation_sources`."""
        if self.rule == "sources":
            return "validation" if named else "train"
        if self.rule == "files":
            return "validation" if fraction_of(file.split_key) < self.share else "train"
        return "both"

    def divide(
        self, file: SourceFile, part: Part | Literal["both"], document: Document
    ) -> Iterator[tuple[Part, str]]:
        """The document, or its two pieces, each with the part it belongs to."""
        if part != "both":
            yield part, document.text
        elif self.rule == "documents":
            held_out = fraction_of(f"{file.split_key}:{document.row}") < self.share
            yield ("validation" if held_out else "train"), document.text
        else:
            cut = _cut(document.text, self.share)
            yield "train", document.text[:cut]
            yield "validation", document.text[cut:]

    def __str__(self) -> str:
        """One sentence for people."""
        share = f"{100 * self.share:g} %"
        return {
            "sources": "the files of data.validation_sources are held out",
            "files": f"{share} of the files are held out, by the hash of their names",
            "tails": f"the last {share} of every file is held out, since there are few files of one document",
            "documents": f"{share} of the documents are held out, by the hash of file name and row",
        }[self.rule]


def choose_split(files: Sequence[SourceFile], *, has_validation_sources: bool, share: float) -> Split:
    """The first rule that fits; it depends on the list of files alone."""
    if has_validation_sources:
        return Split("sources", share)
    by_file = Split("files", share)
    if len(files) >= MIN_FILES and len({by_file.part_of(file) for file in files}) == 2:
        return by_file
    one_document_each = all(file.format.kind == "text" for file in files)
    return Split("tails" if one_document_each else "documents", share)


def fraction_of(name: str) -> float:
    """A number in [0, 1) from SHA-256: the hash's last nine decimal digits, the last one first.

    So a share of 0.1 holds out the names whose hash divides by 10, and a smaller share part of those.
    """
    digits = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest(), "big") % 10**9
    return int(f"{digits:09d}"[::-1]) / 1e9


def _cut(text: str, share: float) -> int:
    """Where the held-out end begins: at a line's start where there is one, else at the exact place."""
    exact = int(len(text) * (1 - share))
    newline = text.find("\n", exact)
    return newline + 1 if 0 <= newline < len(text) - 1 else exact
