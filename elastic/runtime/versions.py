"""Versions of the libraries that islands of one run must agree on."""

from __future__ import annotations

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
