"""The outer loop's arithmetic: merge, step, publish, adopt, assemble."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.training.codec import NonFiniteTensor
from elastic.training.digest import digest
from elastic.training.outer import (
    MergeError,
    OuterState,
    adopt,
    assemble,
    delta,
    delta_norm,
    merge,
)

pytestmark = pytest.mark.unit

SHAPES = {"w": (6, 5), "b": (5,), "s": ()}


def _random(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


# -------------------------------------------------------------------------------------- merge


def test_weights_are_the_work_really_done() -> None:
    """Islands with 8 and 2 steps' tokens count 4 to 1; an island without work counts nothing."""
    deltas = [{"x": torch.tensor([10.0])}, {"x": torch.tensor([5.0])}, {"x": torch.tensor([77.0])}]
    assert merge(deltas, [800, 200, 0])["x"].item() == pytest.approx(9.0)


def test_equal_weights_are_the_plain_mean() -> None:
    """Two equal weights, of any size, give exactly the mean."""
    first, second = _random(1), _random(2)
    expected = {name: first[name] * 0.5 + second[name] * 0.5 for name in SHAPES}
    assert _same(merge([first, second], [1, 1]), expected)
    assert _same(merge([first, second], [4096, 4096]), expected)


def test_one_contribution_is_itself() -> None:
    """The mean of one is the same bits."""
    assert _same(merge([_random(1)], [123]), _random(1))


def test_merge_does_not_touch_its_inputs() -> None:
    """Contributions can be kept and merged again."""
    first, second = _random(1), _random(2)
    again = merge([first, second], [3, 1])
    assert _same(first, _random(1))
    assert _same(again, merge([_random(1), _random(2)], [3, 1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_contribution_is_refused_by_name(bad: float) -> None:
    """A NaN or an Inf in any contribution, not only the first, names contribution and tensor."""
    poisoned = _random(2)
    poisoned["b"][3] = bad
    with pytest.raises(NonFiniteTensor, match="contribution 1: b"):
        merge([_random(1), poisoned], [1, 1])


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1, math.nan], [1]])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    """All zero, negative, NaN, or too few weights raise."""
    with pytest.raises(MergeError, match="weight"):
        merge([_random(1), _random(2)], weights)


def test_contributions_of_different_models_are_refused() -> None:
    """Missing, unknown, misshapen and wrongly typed tensors are named."""
    good = _random(1)
    with pytest.raises(MergeError, match=r"missing \['b'\]"):
        merge([good, {name: t for name, t in good.items() if name != "b"}], [1, 1])
    with pytest.raises(MergeError, match=r"unknown \['z'\]"):
        merge([good, good | {"z": torch.ones(1)}], [1, 1])
    with pytest.raises(MergeError, match=r"w: .*\[5, 6\]"):
        merge([good, good | {"w": torch.ones(5, 6)}], [1, 1])
    with pytest.raises(MergeError, match="bfloat16"):
        merge([good, good | {"b": good["b"].bfloat16()}], [1, 1])


# --------------------------------------------------------------------------------------- step


def test_step_is_torchs_nesterov() -> None:
    """Ten steps equal torch.optim.SGD(nesterov=True) fed with the merged deltas as gradients."""
    state = OuterState(_random(0))
    reference = {name: torch.nn.Parameter(t.clone()) for name, t in _random(0).items()}
    sgd = torch.optim.SGD(reference.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(10):
        d = _random(step + 1)
        state.step(d, lr=0.7, momentum=0.9)
        for name, parameter in reference.items():
            parameter.grad = d[name].clone()
        sgd.step()
    for name, parameter in reference.items():
        torch.testing.assert_close(state.theta[name], parameter.detach(), rtol=1e-6, atol=1e-6)


def test_lr_one_without_momentum_is_averaging() -> None:
    """With lr 1 and mu 0 the new parameters are the mean of the islands' own."""
    base, locals_ = _random(0), [_random(1), _random(2)]
    state = OuterState(dict(base))
    state.step(merge([delta(base, local) for local in locals_], [1, 1]), lr=1.0, momentum=0.0)
    for name in SHAPES:
        mean = (locals_[0][name] + locals_[1][name]) / 2
        torch.testing.assert_close(state.theta[name], mean, rtol=1e-6, atol=1e-6)
    assert all(not t.any() for t in state.momentum.values())


def test_scale_shrinks_the_step() -> None:
    """A merge of half of the expected tokens moves half as far."""
    whole, half = OuterState(_random(0)), OuterState(_random(0))
    whole.step(_random(1), lr=0.7, momentum=0.9)
    half.step(_random(1), lr=0.7, momentum=0.9, scale=0.5)
    for name, start in _random(0).items():
        moved, expected = half.theta[name] - start, (whole.theta[name] - start) * 0.5
        torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)


def test_a_shallow_copy_is_a_snapshot() -> None:
    """Steps and publications never write into tensors that were handed out."""
    state = OuterState(_random(0))
    state.publish("bf16")
    copies = [dict(state.theta), dict(state.momentum), dict(state.published)]
    before = [{n: t.clone() for n, t in copy.items()} for copy in copies]
    state.step(_random(1), lr=0.7, momentum=0.9)
    state.publish("bf16")
    assert all(_same(copy, kept) for copy, kept in zip(copies, before, strict=True))


def test_a_snapshot_and_the_deltas_after_it_replay_to_the_same_bits() -> None:
    """A state rebuilt from copies of its three dictionaries continues with identical digests."""
    state = OuterState(_random(0))
    for step in range(3):
        state.step(_random(step + 1), lr=0.7, momentum=0.9)
        state.publish("bf16")
    copy = OuterState(
        *({n: t.clone() for n, t in d.items()} for d in (state.theta, state.momentum, state.published))
    )
    for step in range(3, 6):
        for each in (state, copy):
            each.step(_random(step + 1), lr=0.7, momentum=0.9)
            each.publish("bf16")
    assert digest(state.theta) == digest(copy.theta)
    assert digest(state.momentum) == digest(copy.momentum)
    assert digest(state.published) == digest(copy.published)


def test_a_state_of_another_model_is_refused() -> None:
    """Momentum or a merged delta with other names than theta raises before anything moves."""
    with pytest.raises(MergeError, match="momentum"):
        OuterState(_random(0), momentum={"w": torch.zeros(6, 5)})
    state = OuterState(_random(0))
    with pytest.raises(MergeError, match="merged delta"):
        state.step({"w": torch.zeros(6, 5)}, lr=1.0, momentum=0.9)
    assert _same(state.theta, _random(0))


# ------------------------------------------------------------------------------------ publish


def test_fp32_publishes_theta_exactly() -> None:
    """Under fp32 published has the bits of theta, on both sides."""
    state = OuterState(_random(0))
    islands = dict(state.published)
    state.step(_random(1), lr=0.7, momentum=0.9)
    islands = adopt(islands, state.publish("fp32"), "fp32")
    assert digest(state.published) == digest(state.theta) == digest(islands)


def test_bf16_carries_its_rounding_error_on() -> None:
    """Islands that follow the packets hold the synchronizer's published bits, and it nears theta."""
    state = OuterState(_random(0))
    islands = dict(state.published)
    for step in range(5):
        state.step(_random(step + 1), lr=0.7, momentum=0.9)
        packet = state.publish("bf16")
        assert packet["w"].dtype == torch.bfloat16
        islands = adopt(islands, packet, "bf16")
        assert digest(islands) == digest(state.published)
    first = delta_norm(delta(state.theta, state.published))
    assert 0 < first < 0.05 * delta_norm(state.theta)
    islands = adopt(islands, state.publish("bf16"), "bf16")
    assert delta_norm(delta(state.theta, islands)) < first / 50


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6))
def test_rows_can_adopt_alone(cut: int) -> None:
    """A rank that applies its rows of a packet holds its rows of published."""
    state = OuterState(_random(0))
    held = state.published["w"][:cut]
    state.step(_random(1), lr=0.7, momentum=0.9)
    packet = state.publish("bf16")
    rows = adopt({"w": held}, {"w": packet["w"][:cut]}, "bf16")["w"]
    assert torch.equal(rows, state.published["w"][:cut])


# ----------------------------------------------------------------------------------- assemble


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=4), st.randoms(use_true_random=False))
def test_assemble_undoes_any_cut(cuts: list[int], random) -> None:  # type: ignore[no-untyped-def]
    """Rows cut anywhere, in any order of parts, empty ones too, give back the same digest."""
    whole = _random(0)
    edges = [0, *sorted(cuts), 6]
    parts: list[dict[str, tuple[int, Tensor]]] = [
        {"w": (a, whole["w"][a:b])} for a, b in itertools.pairwise(edges)
    ]
    parts[0] |= {"s": (0, whole["s"])}
    parts[-1] |= {"b": (0, whole["b"])}
    random.shuffle(parts)
    assert digest(assemble(parts, SHAPES)) == digest(whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 3)], r"w: rows missing \(saw: rows 3 to 6 of 6\)"),
        ([(0, 2), (4, 6)], r"w: rows missing \(saw: rows 2 to 4 of 6\)"),
        ([(0, 4), (3, 6)], r"w: rows sent twice \(saw: rows 3 to 4 of 6\)"),
        ([(0, 6), (0, 6)], r"w: rows sent twice"),
        ([], r"w: rows missing"),
    ],
)
def test_holes_and_doubles_are_named(parts: list[tuple[int, int]], message: str) -> None:
    """Rows that are missing or come twice raise with the tensor's name and the rows."""
    whole = torch.zeros(6, 5)
    with pytest.raises(MergeError, match=message):
        assemble([{"w": (a, whole[a:b])} for a, b in parts], {"w": (6, 5)})


def test_wrong_parts_are_named() -> None:
    """Unknown names, other shapes, rows beyond the end, and double scalars raise by name."""
    rows = torch.zeros(6, 5)
    with pytest.raises(MergeError, match="z: a part holds"):
        assemble([{"z": (0, rows)}], {"w": (6, 5)})
    with pytest.raises(MergeError, match="w: rows of another shape"):
        assemble([{"w": (0, torch.zeros(6, 4))}], {"w": (6, 5)})
    with pytest.raises(MergeError, match="w: rows beyond the end"):
        assemble([{"w": (0, torch.zeros(7, 5))}], {"w": (6, 5)})
    with pytest.raises(MergeError, match="s: a scalar must come exactly once"):
        assemble([{"s": (0, torch.ones(()))}] * 2, {"s": ()})
