"""Versions of the libraries that islands of one run must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


def library_versions() -> dict[str, str]:
    """Version of `elastic` and `torch` in this process."""
    versions = {}
    for name, distribution in (("elastic", "elastic-islands"), ("torch", "torch")):
        try:
            versions[name] = version(distribution)
        except PackageNotFoundError:
            versions[name] = "0.0 (not installed)"
    return versions


def version_differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(library, theirs, ours) where the major or minor version differs; patch levels may."""
    return [
        (name, theirs.get(name, "missing"), version)
        for name, version in ours.items()
        if _minor(theirs.get(name, "")) != _minor(version)
    ]


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
