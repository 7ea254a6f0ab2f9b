"""A value that is there by now, although its type says that it may be missing."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """The value itself.

    For settings that `elastic.base.resolve` fills in, and for what an earlier step of a protocol has
    set. Raises RuntimeError when it is missing: then that step was left out, which is a bug.
    """
    if value is None:
        raise RuntimeError("a value is used before it is known: an unresolved job, or a step left out")
    return value
