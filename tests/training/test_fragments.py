"""Fragments: every parameter in exactly one, by layers or by size, the same for all who ask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.base.config import DecoderModel
from elastic.base.errors import ConfigError
from elastic.training.fragments import block_names, split
from elastic.training.model import build_model
from elastic.training.shard import parameters_of, shard

pytestmark = pytest.mark.unit

# An embedding of 100 values, seven blocks of 5 + 1, a final norm of 1, a head of 100.
BLOCKS = [[f"b{layer}.w", f"b{layer}.n"] for layer in range(7)]
SHAPES: dict[str, tuple[int, ...]] = {
    "emb": (50, 2),
    **{name: ((5, 1) if name.endswith("w") else (1,)) for block in BLOCKS for name in block},
    "norm": (1,),
    "head": (50, 2),
}


def of_layers(*layers: int) -> list[str]:
    return [name for layer in layers for name in BLOCKS[layer]]


def test_one_fragment_holds_all_names_in_order() -> None:
    """With one fragment every parameter is in it, in order of definition, whatever the pattern."""
    for pattern in ("sequential", "strided", "balanced"):
        assert split(SHAPES, 1, pattern, BLOCKS) == [list(SHAPES)]
        assert split({"b": (), "a": (3,)}, 1, pattern) == [["b", "a"]]


def test_sequential_takes_neighbours() -> None:
    """Seven layers in three: 3, 2 and 2; the embedding goes first, final norm and head last."""
    first, second, third = split(SHAPES, 3, "sequential", BLOCKS)
    assert first == ["emb", *of_layers(0, 1, 2)]
    assert second == of_layers(3, 4)
    assert third == [*of_layers(5, 6), "norm", "head"]


def test_strided_deals_layers_out() -> None:
    """Layer l is in fragment l mod P; embedding and head are placed as in sequential."""
    first, second, third = split(SHAPES, 3, "strided", BLOCKS)
    assert first == ["emb", *of_layers(0, 3, 6)]
    assert second == of_layers(1, 4)
    assert third == [*of_layers(2, 5), "norm", "head"]


def test_a_tensor_between_blocks_stays_with_the_block_before() -> None:
    """A middle norm belongs to the layers it follows, for both patterns by layers."""
    shapes = {"a": (2,), "middle": (1,), "b": (2,), "c": (2,)}
    blocks = [["a"], ["b"], ["c"]]
    assert split(shapes, 3, "sequential", blocks) == [["a", "middle"], ["b"], ["c"]]
    assert split(shapes, 2, "strided", blocks) == [["a", "middle", "c"], ["b"]]


def test_balanced_by_hand() -> None:
    """100, 100, then seven blocks of 6, then the norm: two with a matrix of 100 each, one with the rest."""
    parts = split(SHAPES, 3, "balanced", BLOCKS)
    assert parts == [["emb"], ["head"], [*of_layers(*range(7)), "norm"]]
    two = split(SHAPES, 2, "balanced", BLOCKS)
    assert two == [["emb", *of_layers(0, 2, 4, 6)], [*of_layers(1, 3, 5), "norm", "head"]]


def test_balanced_parts_blocks_only_when_it_must() -> None:
    """With more fragments than blocks, single tensors are dealt out instead."""
    shapes = {"b0.w": (8,), "b0.n": (2,), "b1.w": (7,), "b1.n": (1,)}
    blocks = [["b0.w", "b0.n"], ["b1.w", "b1.n"]]
    assert split(shapes, 2, "balanced", blocks) == blocks
    assert split(shapes, 3, "balanced", blocks) == [["b0.w"], ["b1.w"], ["b0.n", "b1.n"]]
    assert split(shapes, 4, "balanced", blocks) == [["b0.w"], ["b1.w"], ["b0.n"], ["b1.n"]]


def test_without_blocks_tensors_are_the_layers() -> None:
    """A model with no blocks is cut by tensors in order; the scripted scenarios need no blocks at all."""
    shapes = {"layers.0.weight": (3, 2), "layers.0.bias": (2,), "layers.1.weight": (3, 2)}
    assert split(shapes, 2, "sequential") == [["layers.0.weight", "layers.0.bias"], ["layers.1.weight"]]
    assert split(shapes, 2, "strided") == [["layers.0.weight", "layers.1.weight"], ["layers.0.bias"]]
    by_layer = [["layers.0.weight", "layers.0.bias"], ["layers.1.weight"]]
    assert split(shapes, 2, "sequential", by_layer) == by_layer


def test_a_fragment_left_empty_is_refused() -> None:
    """The message says how many are possible, and whether balanced could make more."""
    with pytest.raises(
        ConfigError, match=r"8 asked for, but 7 blocks .* 1 to 7 .*strided; balanced can also"
    ):
        split(SHAPES, 8, "strided", BLOCKS)
    with pytest.raises(ConfigError, match=r"18 asked for, but 17 parameters .* 1 to 17 .*balanced$"):
        split(SHAPES, 18, "balanced", BLOCKS)
    with pytest.raises(ConfigError, match=r"2 asked for, but 1 parameter "):
        split({"a": (1,)}, 2, "sequential")
    with pytest.raises(ConfigError, match="0 asked for"):
        split(SHAPES, 0, "sequential", BLOCKS)


@pytest.mark.parametrize("blocks", [[["gone"]], [["b0.w"], ["b0.w"]]])
def test_blocks_of_another_model_are_refused(blocks: list[list[str]]) -> None:
    """A block with an unknown or a repeated name is a mistake of the caller."""
    with pytest.raises(ValueError, match="each once"):
        split(SHAPES, 1, "sequential", blocks)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=9),
    outside=st.tuples(*[st.lists(st.integers(0, 30), max_size=2)] * 2),
    fragments=st.integers(1, 8),
    pattern=st.sampled_from(["sequential", "strided", "balanced"]),
)
def test_every_name_once_and_no_fragment_empty(sizes, outside, fragments, pattern) -> None:
    """A partition in order of definition, or a refusal exactly when there is too little to share."""
    blocks = [[f"b{i}.{j}" for j in range(len(block))] for i, block in enumerate(sizes)]
    inside = {f"b{i}.{j}": (size,) for i, block in enumerate(sizes) for j, size in enumerate(block)}
    before = {f"e{i}": (size,) for i, size in enumerate(outside[0])}
    after = {f"h{i}": (size,) for i, size in enumerate(outside[1])}
    shapes = {**before, **inside, **after}
    real = [block for block in blocks if block]
    possible = len(shapes) if pattern == "balanced" or not real else len(real)
    if fragments > possible:
        with pytest.raises(ConfigError):
            split(shapes, fragments, pattern, blocks)
        return
    parts = split(shapes, fragments, pattern, blocks)
    assert len(parts) == fragments
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(shapes)
    order = list(shapes)
    assert all(part == sorted(part, key=order.index) for part in parts)
    of = {name: number for number, part in enumerate(parts) for name in part}
    layers = [of[block[0]] for block in real]
    if pattern != "balanced" or len(real) >= fragments:
        assert all(len({of[name] for name in block}) == 1 for block in real)
    if pattern == "balanced":
        units = [sum(shapes[name][0] for name in block) for block in real] if len(real) >= fragments else []
        single = shapes if not units else {**before, **after}
        largest = max([*units, *(size[0] for size in single.values())])
        totals = [sum(math.prod(shapes[name]) for name in part) for part in parts]
        assert max(totals) - min(totals) <= largest  # what greedy filling promises
    elif real:
        assert all(of[name] == 0 for name in before)
        assert all(of[name] == fragments - 1 for name in after)
        counts = [layers.count(number) for number in range(fragments)]
        assert max(counts) - min(counts) <= 1
        if pattern == "sequential":
            assert layers == sorted(layers)


def test_blocks_of_the_decoder() -> None:
    """The decoder's layers by name, and a tied head is not named twice."""
    model = build_model(DecoderModel(d_model=16, num_layers=3, num_heads=2), 32, 8, 0)
    names = list(parameters_of(model))
    assert block_names(model) == [[n for n in names if n.startswith(f"blocks.{i}.")] for i in range(3)]
    shapes = {name: tuple(p.shape) for name, p in parameters_of(model).items()}
    first, _, last = split(shapes, 3, "strided", block_names(model))
    assert first[0] == "embedding.weight"
    assert last[-1] == "final_norm.weight"
    model.blocks[1].requires_grad_(False)
    assert [block[0].split(".")[1] for block in block_names(model)] == ["0", "2"]


def test_no_blocks() -> None:
    """A model that is one layer has none."""
    assert block_names(nn.Linear(2, 2)) == []


def test_every_rank_cuts_the_same() -> None:
    """A sharded model, whose last rank holds no row of some tensors, is cut like the whole one."""
    config = DecoderModel(d_model=16, num_layers=4, num_heads=2, num_kv_heads=1, tied_head=False)
    whole = build_model(config, 33, 8, 0)

    def cuts(model: nn.Module) -> list[list[list[str]]]:
        shapes = {name: tuple(p.shape) for name, p in parameters_of(model).items()}
        patterns = ("sequential", "strided", "balanced")
        return [split(shapes, n, pattern, block_names(model)) for n in (2, 4) for pattern in patterns]

    expected = cuts(whole)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        model = build_model(config, 33, 8, 0)
        shard(model, init_device_mesh("cpu", (3,)), torch.float32)
        assert cuts(model) == expected
    finally:
        torch.distributed.destroy_process_group()
