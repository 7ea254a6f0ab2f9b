"""Sharding: which rows a rank holds, and what stays whole. Real ranks are in test_inner.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elastic.training.shard import (
    chunk,
    compute_dtype_of,
    like,
    local_of,
    parameters_of,
    rows_of,
    shard,
    spoken_rows,
)

pytestmark = pytest.mark.unit


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts_them(rows: int, world_size: int) -> None:
    """`chunk` is torch.chunk, with empty ranges for the ranks that get nothing, and covers all rows."""
    cuts = [chunk(rows, world_size, rank) for rank in range(world_size)]
    expected = [len(piece) for piece in torch.arange(rows).chunk(world_size)] if rows else []
    sizes = [stop - start for start, stop in cuts]
    assert sizes == expected + [0] * (world_size - len(expected)) or rows == 0
    assert [row for start, stop in cuts for row in range(start, stop)] == list(range(rows))


def test_compute_dtype() -> None:
    """`auto` is fp32 on the CPU and bf16 on accelerators; what is asked for is kept."""
    assert compute_dtype_of("auto", "cpu") == torch.float32
    assert compute_dtype_of("auto", "cuda:1") == torch.bfloat16
    assert compute_dtype_of("bf16", "cpu") == torch.bfloat16
    assert compute_dtype_of("fp32", "cuda") == torch.float32


def test_trainable_parameters_once_in_order() -> None:
    """Tied parameters appear once under their first name, frozen ones not at all."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.z = nn.Embedding(4, 3)
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)
            self.a = nn.Linear(3, 4, bias=False)
            self.a.weight = self.z.weight
            self.norm = nn.LayerNorm(3)

    assert list(parameters_of(Tied())) == ["z.weight", "norm.weight", "norm.bias"]


def test_a_plain_tensor_is_whole() -> None:
    """Without a mesh a rank holds, and speaks for, all rows; its local rows share memory."""
    matrix, scalar = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.tensor(1.0))
    assert rows_of(matrix) == (0, 5)
    assert rows_of(scalar) == (0, 1)
    assert spoken_rows(matrix, 0) == (0, 5)
    assert spoken_rows(scalar, 1) == (0, 0)
    local_of(matrix)[0, 0] = 7.0
    assert matrix[0, 0].item() == 7.0
    assert not local_of(matrix).requires_grad
    moment = torch.zeros(5, 2)
    assert like(matrix, moment) is moment


def test_without_a_mesh_the_model_stays_as_it_is() -> None:
    """`shard` with no mesh changes nothing."""
    model = nn.Linear(2, 2)
    before = model.weight
    shard(model, None, torch.bfloat16)
    assert model.weight is before
    assert type(model) is nn.Linear
