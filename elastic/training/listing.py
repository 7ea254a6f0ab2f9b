"""List the sources, check them in seconds before anything starts, and compare them with a manifest later.

`check_sources` answers "is this a corpus?" without reading it; `compare` names what has changed since, so
that a changed file is never silently read.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic.base.config import Data
from elastic.base.errors import DataError
from elastic.training.documents import BadFileError, ReadOptions, Skipped
from elastic.training.manifest import FileEntry, Manifest, TextHash
from elastic.training.readers import check_file, read_documents
from elastic.training.sources import FileList, SourceFile, list_files
from elastic.training.split import choose_split

CHECKED_FILES = 256
"""Files opened before the start, spread over the list; the others are checked when they are read."""


@dataclass(frozen=True)
class Listing:
    """The sources of a `Data`, listed: a manifest without hashes, and where each of its files lies."""

    files: tuple[SourceFile, ...]
    manifest: Manifest


@dataclass(frozen=True)
class Change:
    """A difference between a manifest and the sources now."""

    name: str
    what: str

    def __str__(self) -> str:
        """name: what."""
        return f"{self.name}: {self.what}"


def read_options(data: Data) -> ReadOptions:
    """What of `data` concerns reading."""
    return ReadOptions(data.text_column, int(data.max_document_mb * 1e6))


def list_sources(data: Data) -> Listing:
    """List all files of `data` and decide what is held out. Raises DataError, see `list_files`."""
    train = list_files(data.sources)
    held_out = FileList()
    if data.validation_sources is not None:
        held_out = list_files(data.validation_sources, where="data.validation_sources")
        locations = {file.location: file.name for file in train.files}
        for file in held_out.files:
            if file.location in locations:
                raise DataError(
                    "a file is in both data.sources and data.validation_sources",
                    where=file.name,
                    saw=f"also listed as {locations[file.location]}",
                    fix="take it out of one of them",
                )
    named = {file.location for file in held_out.files}
    split = choose_split(
        train.files, has_validation_sources=data.validation_sources is not None, share=data.validation_share
    )
    files = tuple(sorted([*train.files, *held_out.files], key=lambda file: file.name))
    entries = tuple(
        FileEntry(file.name, file.size_bytes, file.version, split.part_of(file, file.location in named))
        for file in files
    )
    ignored = (*train.ignored.values(), *held_out.ignored.values())
    duplicates = tuple(file.name for file in (*train.duplicates, *held_out.duplicates))
    return Listing(files, Manifest(split, entries, ignored, duplicates))


def check_sources(data: Data) -> Manifest:
    """List the sources and look into them, in seconds: before a run starts, is this a corpus?

    Opens tables and JSON lines far enough to see the text column. Raises DataError when a source is
    missing, a column does not exist or holds no text, or nothing holds a document; BadFileError for a
    broken file unless `on_bad_file` is skip. The manifest has no content hashes yet.
    """
    listing = list_sources(data)
    check_listing(listing, data)
    return listing.manifest


def check_listing(listing: Listing, data: Data) -> None:
    """`check_sources` for files that are already listed."""
    if listing.manifest.split.rule != "sources":
        _check_files(listing.files, data, "data.sources")
        return
    for part, where in (("train", "data.sources"), ("validation", "data.validation_sources")):
        entries = zip(listing.files, listing.manifest.files, strict=True)
        _check_files([file for file, entry in entries if entry.part == part], data, where)


def _check_files(files: Sequence[SourceFile], data: Data, where: str) -> None:
    options = read_options(data)

    def look(file: SourceFile) -> bool | BadFileError:
        try:
            return check_file(file, options)
        except BadFileError as error:
            if data.on_bad_file == "stop":
                raise
            return error

    plain = [file for file in files if file.format.kind == "text" and not file.format.compression]
    others = [file for file in files if file.format.kind != "text" or file.format.compression]
    chosen = _spread(others, CHECKED_FILES)
    with ThreadPoolExecutor(8, thread_name_prefix="check-sources") as pool:
        answers = list(pool.map(look, chosen))
    if any(file.size_bytes for file in plain) or True in answers or len(chosen) < len(others):
        return
    problems = [f"{a.where}: {a.what}" for a in answers if isinstance(a, BadFileError)]
    raise empty_corpus(where, problems, len(files))


def empty_corpus(where: str, problems: Sequence[str], num_files: int) -> DataError:
    """The error for sources without a single document."""
    saw = f"{num_files} files without a document"
    if problems:
        saw += f", {len(problems)} of them skipped: {problems[0]}"
    return DataError("empty corpus", where=where, saw=saw, fix="point it to files that hold text")


def compare(manifest: Manifest, data: Data) -> list[Change]:
    """What is different in the sources now; an empty list if nothing.

    A file whose size is the same but whose version is another is read again, so that a mere copy is no
    change. Sources that cannot be listed any more are a change too, not an error.
    """
    try:
        listing = list_sources(data)
    except DataError as error:
        return [Change(error.where or "data.sources", f"{error.what} ({error.saw})")]
    now = {file.name: file for file in listing.files}
    known = {entry.name for entry in manifest.files}
    changes = [Change(name, "new") for name in now if name not in known]
    for entry in manifest.files:
        file = now.get(entry.name)
        if file is None:
            changes.append(Change(entry.name, "missing"))
        elif file.size_bytes != entry.size_bytes:
            changes.append(Change(entry.name, f"size {entry.size_bytes} -> {file.size_bytes} bytes"))
        elif file.version != entry.version:
            what = _content_change(file, entry, read_options(data))
            if what:
                changes.append(Change(entry.name, what))
    return sorted(changes, key=lambda change: change.name)


def _content_change(file: SourceFile, entry: FileEntry, options: ReadOptions) -> str:
    digest = TextHash()
    try:
        for document in read_documents(file, options, Skipped()):
            digest.add(document.utf8)
    except DataError as error:
        return "" if entry.problem else f"{error.what} ({error.saw})"
    return "" if digest.hexdigest() == entry.text_sha256 else "other content"


def _spread(files: Sequence[SourceFile], count: int) -> list[SourceFile]:
    """At most `count` of the files, first and last among them, at even distances."""
    if len(files) <= count:
        return list(files)
    return [files[i * (len(files) - 1) // (count - 1)] for i in range(count)]
