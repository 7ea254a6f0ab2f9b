"""Fragments: which parameters are synchronised together."""

from __future__ import annotations

import pytest

from elastic.base.errors import ConfigError
from elastic.training.fragments import split

pytestmark = pytest.mark.unit


def test_one_fragment_holds_all_names_in_order() -> None:
    """With one fragment every parameter is in it, in order of definition."""
    assert split(["b", "a"], 1) == [["b", "a"]]


def test_more_fragments_are_refused() -> None:
    """A number of fragments that would be ignored is refused, with the number in the message."""
    with pytest.raises(ConfigError, match="4 asked for"):
        split(["a"], 4)
