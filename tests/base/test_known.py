"""A value that must be there by now."""

from __future__ import annotations

import pytest

from elastic.base.known import known

pytestmark = pytest.mark.unit


def test_what_is_there_is_given_back() -> None:
    """Also when it is zero or empty."""
    assert [known(value) for value in (0, "", 1.5)] == [0, "", 1.5]


def test_what_is_missing_is_a_bug() -> None:
    """None means that a step was left out."""
    with pytest.raises(RuntimeError, match="before it is known"):
        known(None)
