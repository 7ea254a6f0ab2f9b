"""Agreement of one rank with itself; two real ranks are in tests/runtime/test_two_ranks.py."""

from __future__ import annotations

import pytest
import torch

from elastic.training.group import Group

pytestmark = pytest.mark.unit


def test_one_rank_agrees_with_itself() -> None:
    """No process group is needed: values and errors come straight from the function."""
    group = Group()
    assert (group.rank, group.world_size) == (0, 1)
    value = {"any": object()}
    assert group.share(lambda: value) is value
    with pytest.raises(KeyError, match="lease 7"):
        group.share(lambda: {}["lease 7"])


def test_the_sum_of_one_is_itself() -> None:
    """Nothing is copied or communicated."""
    values = torch.tensor([1, 2])
    assert Group().sum(values) is values
