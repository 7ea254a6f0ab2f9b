"""From `data.sources` to a sorted list of files: paths, folders, globs, fsspec URLs, `builtin:stdlib`.

Nothing is opened here, only listed. A name that is left out (hidden, unknown suffix, not a regular file)
is counted and listed, never dropped in silence; a file that two sources name is read once.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from elastic.base.errors import DataError, StorageError
from elastic.training.filesystems import (
    HIDDEN,
    Info,
    children,
    has_magic,
    is_hidden,
    joined,
    locate,
    look_at,
    match,
    split_pattern,
    version_of,
)
from elastic.training.formats import SUPPORTED, Format, advice_for, format_of

STDLIB = "builtin:stdlib"

# Folders of the standard library that are not its own source, or that distributions such as Debian ship as
# packages of their own: without them every CPython of one minor version lists the same files.
_STDLIB_FOLDERS_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
    | {"idlelib", "lib2to3", "tkinter", "turtledemo", "distutils", "macholib"}
)
_STDLIB_FILES_LEFT_OUT = frozenset({"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"})


@dataclass(frozen=True)
class SourceFile:
    """One file to read: how it is called, where it lies here, and what it was when it was listed."""

    name: str
    """The source as written plus the path below it; this is what manifests and messages say."""
    split_key: str
    """Path below its source; the hold-out is decided by its hash, so data may move as a whole."""
    path: str
    filesystem: Any = field(repr=False, compare=False)
    size_bytes: int
    version: str
    """etag or modification time, as the file system tells it."""
    format: Format

    @property
    def location(self) -> str:
        """The place itself, the same for all names of one file."""
        if self.is_local:
            return os.path.realpath(self.path)
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it lies in this machine's own file system."""
        return isinstance(self.filesystem, LocalFileSystem)

    def open(self) -> BinaryIO:
        """The raw bytes, from the start."""
        return self.filesystem.open(self.path, "rb")

    def change(self) -> str:
        """What differs from the listing now, or an empty string. Raises StorageError if unreachable."""
        self.filesystem.invalidate_cache()
        try:
            info = look_at(self.filesystem, self.path)
        except DataError as error:  # it could be looked at before
            raise StorageError(error.what, where=self.name, saw=error.saw, fix=error.fix) from error
        if info is None:
            return "missing"
        if info["size"] != self.size_bytes:
            return f"size {self.size_bytes} -> {info['size']} bytes"
        version = version_of(info)
        return "" if version == self.version else f"{self.version} -> {version}"


@dataclass
class Ignored:
    """Names that were left out for one reason."""

    reason: str
    count: int = 0
    names: list[str] = field(default_factory=list)
    """The first of them, at most 100."""


@dataclass
class FileList:
    """Files in the order of their names, and what was left out."""

    files: list[SourceFile] = field(default_factory=list)
    ignored: dict[str, Ignored] = field(default_factory=dict)
    duplicates: list[SourceFile] = field(default_factory=list)
    """Files that were already listed, under this or another name; they are read once."""

    def ignore(self, reason: str, name: str) -> None:
        """Leave a name out and say why."""
        ignored = self.ignored.setdefault(reason, Ignored(reason))
        ignored.count += 1
        if len(ignored.names) < 100:
            ignored.names.append(name)


def list_files(sources: Sequence[str], *, where: str = "data.sources") -> FileList:
    """Expand `sources`; `where` is the option they come from, for messages.

    Raises DataError when a source does not exist, cannot be listed, or holds nothing we read.
    """
    result = FileList()
    seen: set[str] = set()
    for source in sources:
        found = FileList()
        found.files = list(_expand(source, found, where))
        if not found.files:
            left_out = [f"{i.count} x {i.reason}: {', '.join(i.names[:5])}" for i in found.ignored.values()]
            raise DataError(
                "empty corpus: no file that can be read",
                where=f"{where}: {source}",
                saw="; ".join(left_out) or "an empty folder",
                fix=f"name files one by one, or use one of: {SUPPORTED}",
            )
        for file in found.files:
            (result.duplicates if file.location in seen else result.files).append(file)
            seen.add(file.location)
        for ignored in found.ignored.values():
            total = result.ignored.setdefault(ignored.reason, Ignored(ignored.reason))
            total.count += ignored.count
            total.names = (total.names + ignored.names)[:100]
    result.files.sort(key=lambda file: file.name)
    return result


def _expand(source: str, found: FileList, where: str) -> Iterator[SourceFile]:
    if source.startswith("builtin:"):
        yield from _expand_builtin(source, where)
        return
    if not source.strip():
        raise DataError("a source is empty", where=where, saw=repr(source), fix="name a file, folder or URL")
    filesystem, root, label = locate(source, where)
    info = look_at(filesystem, root)
    if info is not None and info["type"] == "directory":
        yield from _walk(filesystem, root, label, "", found, ())
    elif info is not None:
        yield _explicit(filesystem, root, label, info, where)
    elif has_magic(label):
        yield from _expand_glob(filesystem, root, label, found, where)
    else:
        raise DataError(
            "no such file or folder",
            where=f"{where}: {source}",
            saw=f"nothing at {root}",
            fix="correct the path; relative paths start at the working directory",
        )


def _expand_builtin(source: str, where: str) -> Iterator[SourceFile]:
    if source != STDLIB:
        raise DataError(
            "no such built-in corpus", where=f"{where}: {source}", saw=source, fix=f"the only one is {STDLIB}"
        )
    root, filesystem = sysconfig.get_path("stdlib"), LocalFileSystem()
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _STDLIB_FOLDERS_LEFT_OUT and not f.startswith("config-")]
        for file in files:
            if file.endswith(".py") and not (
                file in _STDLIB_FILES_LEFT_OUT or file.startswith("_sysconfigdata")
            ):
                path = os.path.join(folder, file)
                key = os.path.relpath(path, root).replace(os.sep, "/")
                info = look_at(filesystem, path)
                if info is not None and info["type"] == "file":
                    yield _source_file(filesystem, f"{STDLIB}/{key}", key, path, info, Format("text"))


def _expand_glob(filesystem: Any, root: str, label: str, found: FileList, where: str) -> Iterator[SourceFile]:
    base, base_label, pattern = split_pattern(filesystem, root, label)
    matches = {m[0]: m for m in match(filesystem, base, "", pattern, base_label, found.ignore)}
    if not matches and not found.ignored:
        raise DataError(
            "the glob matches nothing",
            where=f"{where}: {label}",
            saw=f"no match for {'/'.join(pattern)} in {base or '/'}",
            fix="correct the pattern; `**` reaches into all folders below",
        )
    for path, relative, info in matches.values():
        name = joined(base_label, relative)
        if info["type"] == "directory":
            yield from _walk(filesystem, path, name, relative, found, ())
        else:
            yield from _accept(filesystem, name, relative, path, info, found)


def _explicit(filesystem: Any, root: str, label: str, info: Info, where: str) -> SourceFile:
    """A file that the user named: what we cannot read is an error."""
    base = root.rpartition("/")[2]
    if info["type"] != "file":  # a FIFO would block for ever
        raise DataError(
            "not a regular file", where=f"{where}: {label}", saw=info["type"], fix="write it into a file"
        )
    format = format_of(root)
    if format is None:
        raise DataError(
            "files of this kind cannot be read", where=f"{where}: {label}", saw=base, fix=advice_for(root)
        )
    return _source_file(filesystem, label, base, root, info, format)


def _walk(
    filesystem: Any, folder: str, name: str, relative: str, found: FileList, above: tuple[str, ...]
) -> Iterator[SourceFile]:
    """All files below a folder, in order; `above` holds the folders we came through, against link cycles."""
    if isinstance(filesystem, LocalFileSystem):
        real = os.path.realpath(folder)
        if real in above:
            found.ignore("a link back to a folder above", f"{name}/")
            return
        above = (*above, real)
    for child, path, info in children(filesystem, folder, name, found.ignore):
        child_name, child_relative = joined(name, child), joined(relative, child)
        is_folder = info["type"] == "directory"
        if is_hidden(child):
            found.ignore(HIDDEN, child_name + "/" * is_folder)
        elif is_folder:
            yield from _walk(filesystem, path, child_name, child_relative, found, above)
        else:
            yield from _accept(filesystem, child_name, child_relative, path, info, found)


def _accept(
    filesystem: Any, name: str, relative: str, path: str, info: Info, found: FileList
) -> Iterator[SourceFile]:
    """A file that nobody named by itself: taken if we can read it, else ignored by name."""
    format = format_of(path)
    if info["type"] != "file":
        found.ignore("not a regular file", name)
    elif format is None:
        found.ignore("unknown suffix", name)
    else:
        yield _source_file(filesystem, name, relative, path, info, format)


def _source_file(filesystem: Any, name: str, key: str, path: str, info: Info, format: Format) -> SourceFile:
    return SourceFile(name, key, path, filesystem, int(info["size"] or 0), version_of(info), format)
