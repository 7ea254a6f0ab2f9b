"""Look into local folders, buckets and other fsspec places in one way, and match globs there.

Links are followed, errors of every client become `DataError`, and a name that exists wins over a pattern:
fsspec's own glob takes the brackets of a folder called `runs[1]` for a pattern and reads its neighbours.
"""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from elastic.base.errors import DataError

Info = dict[str, Any]
"""What fsspec tells of a path: at least name, size and type (file, directory, other)."""

Ignore = Callable[[str, str], None]
"""Called with a reason and a name for each name that is left out."""

HIDDEN = "the name begins with _ or ."
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def locate(source: str, where: str) -> tuple[Any, str, str]:
    """(file system, path in it, how the source is called in names).

    Raises DataError for an unknown protocol, or one whose package is missing.
    """
    if "://" not in source:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(source)), os.path.normpath(source)
    protocol = source.partition("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(source)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        raise DataError(
            f"{protocol}:// needs a package that is not installed",
            where=f"{where}: {source}",
            saw=str(error),
            fix=f"pip install 'elastic-islands[{extra}]'" if extra else str(error),
        ) from error
    except ValueError as error:
        raise DataError(
            "unknown kind of URL",
            where=f"{where}: {source}",
            saw=str(error),
            fix="use a path, s3://, gs:// or another protocol of fsspec",
        ) from error
    return filesystem, path.rstrip("/"), source.rstrip("/")


def look_at(filesystem: Any, path: str) -> Info | None:
    """Info of a path, links followed; None when there is nothing. Raises DataError on refusal."""
    try:
        return filesystem.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # each cloud's client has its own tree of errors
        if isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise _refused("the source cannot be looked at", path, error) from error


def version_of(info: Info) -> str:
    """etag or modification time, as text with its name; empty if the place tells neither."""
    for key in _VERSION_KEYS:
        value = info.get(key)
        if value is not None:
            if isinstance(value, datetime):  # a listing may have the same time as a number
                value = value.timestamp()
            return f"{key.lower()}:{str(value).strip(chr(34))}"
    return ""


def is_hidden(name: str) -> bool:
    """Whether other tools would skip this name in silence; we skip it and say so."""
    return name[0] in "._"


def children(filesystem: Any, folder: str, name: str, ignore: Ignore) -> Iterator[tuple[str, str, Info]]:
    """(name, path, info) of what lies directly in a folder called `name`, sorted by name."""
    try:
        infos: dict[str, Info] = {
            entry["name"].rstrip("/"): entry for entry in filesystem.ls(folder, detail=True)
        }
    except Exception as error:  # each cloud's client has its own tree of errors
        raise _refused("the folder cannot be listed", name or folder, error) from error
    for path in sorted(infos):
        info: Info | None = infos[path]
        child = path.rpartition("/")[2]
        if path == folder.rstrip("/"):  # some stores list the folder's own marker
            continue
        if isinstance(filesystem, LocalFileSystem) and infos[path]["islink"]:
            info = look_at(filesystem, path)  # what it points to
        if info is None:
            ignore("a broken link", joined(name, child))
        else:
            yield child, path, info


def has_magic(text: str) -> bool:
    """Whether a path may be a glob."""
    return any(character in text for character in "*?[")


def split_pattern(filesystem: Any, root: str, label: str) -> tuple[str, str, list[str]]:
    """Cut before the first component that can only be a pattern: (folder, its label, the pattern)."""
    parts = root.split("/")
    first = len(parts) - 1
    for index, part in enumerate(parts):
        if has_magic(part) and look_at(filesystem, "/".join(parts[: index + 1])) is None:
            first = index
            break
    pattern = parts[first:]
    return "/".join(parts[:first]), "/".join(label.split("/")[: -len(pattern)]), pattern


def match(
    filesystem: Any, folder: str, relative: str, pattern: list[str], label: str, ignore: Ignore
) -> Iterator[tuple[str, str, Info]]:
    """(path, path relative to the pattern's folder, info) of what matches, one component at a time.

    `**` stands for any number of folders. Hidden names match only a component that begins like them.
    """
    if not pattern:
        info = look_at(filesystem, folder)
        if info is not None:
            yield folder, relative, info
        return
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        yield from match(filesystem, folder, relative, rest, label, ignore)
        if not rest:
            return
    elif look_at(filesystem, f"{folder}/{head}") is not None:
        yield from match(filesystem, f"{folder}/{head}", joined(relative, head), rest, label, ignore)
        return
    elif not has_magic(head):
        return
    for child, path, info in children(filesystem, folder, joined(label, relative), ignore):
        below, is_folder = joined(relative, child), info["type"] == "directory"
        if head == "**":
            if is_folder and not is_hidden(child):
                yield from match(filesystem, path, below, pattern, label, ignore)
        elif fnmatch.fnmatchcase(child, head) and (is_folder or not rest):
            if is_hidden(child) and child[0] != head[0]:
                ignore(HIDDEN, joined(label, below) + "/" * is_folder)
            else:
                yield from match(filesystem, path, below, rest, label, ignore)


def joined(*parts: str) -> str:
    """Path of the parts that are not empty."""
    return "/".join(part for part in parts if part)


def _refused(what: str, where: str, error: Exception) -> DataError:
    return DataError(
        what,
        where=where,
        saw=f"{type(error).__name__}: {error}",
        fix="check the address, and the permissions and credentials of this process",
    )
