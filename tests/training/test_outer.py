"""The outer loop's arithmetic: step, publish, adopt."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.training import chunks
from elastic.training.assemble import MergeError
from elastic.training.codec import Codec, NonFiniteTensor, decode
from elastic.training.digest import digest
from elastic.training.outer import (
    OuterState,
    adopt,
    adopt_blend,
    adopt_keep_progress,
    delta,
    delta_norm,
    encode_with_feedback,
)

pytestmark = pytest.mark.unit

SHAPES = {"w": (6, 300), "b": (5,), "s": ()}
CODECS = get_args(Codec)


def _random(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


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
    state = OuterState(base)
    deltas = [delta(base, local) for local in locals_]
    state.step({name: (deltas[0][name] + deltas[1][name]) / 2 for name in base}, lr=1.0, momentum=0.0)
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


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_what_was_given_or_published_is_never_written(codec: Codec) -> None:
    """Not the tensors a state was made of, nor packets, nor what islands hold."""
    given = [_random(0), _random(1), _random(2)]
    state = OuterState(*(dict(tensors) for tensors in given))
    held = [dict(state.published), state.publish(codec), dict(state.published)]
    state.step(_random(3), lr=0.7, momentum=0.9)
    held += [state.publish(codec), dict(state.published)]
    kept = [{name: value.clone() for name, value in tensors.items()} for tensors in held]
    state.step(_random(4), lr=0.7, momentum=0.9)
    state.step_delayed(_random(5), lr=0.7, momentum=0.9, every=2)
    state.publish(codec)
    assert all(_same(now, before) for now, before in zip(held, kept, strict=True))
    assert all(_same(tensors, _random(seed)) for seed, tensors in enumerate(given))


def test_a_step_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 values give the bits of whole tensors, in steps and packets."""
    digests = []
    for size in (chunks.CHUNK, 7):
        monkeypatch.setattr(chunks, "CHUNK", size)
        state = OuterState(_random(0))
        state.step(_random(1), lr=0.7, momentum=0.9, scale=0.3)
        state.step_delayed(_random(2), lr=0.7, momentum=0.9, every=1)
        packet = state.publish("int8")
        digests.append([digest(t) for t in (state.theta, state.momentum, state.published, packet)])
    assert digests[0] == digests[1]


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
        OuterState(_random(0), momentum={"w": torch.zeros(6, 300)})
    state = OuterState(_random(0))
    with pytest.raises(MergeError, match="merged delta"):
        state.step({"w": torch.zeros(6, 300)}, lr=1.0, momentum=0.9)
    assert _same(state.theta, _random(0))


# ------------------------------------------------------------------------------ delayed Nesterov


def test_delayed_nesterov_moves_the_momentum_with_every_second_arrival() -> None:
    """By hand, lr 0.5, mu 0.9, N 2, deltas 1, 2, 3, 4."""
    state = OuterState({"x": torch.tensor([0.0])})
    seen = []
    for arrival in (1.0, 2.0, 3.0, 4.0):
        state.step_delayed({"x": torch.tensor([arrival])}, lr=0.5, momentum=0.9, every=2)
        seen.append(round(state.theta["x"].item(), 5))
    # -lr*1/2; then m = 3/2 and -lr*(0.9*1.5 + 1); -lr*3/2; then m = 0.9*1.5 + 7/2 and -lr*(0.9*4.85 + 2)
    assert seen == [-0.25, -1.425, -2.175, -5.3575]
    assert state.momentum["x"].item() == pytest.approx(4.85)
    assert (state.arrivals, state.acc["x"].item()) == (0, 0.0)


def test_delayed_nesterov_of_every_arrival_is_nesterov() -> None:
    """N 1 is the plain step."""
    delayed, plain = OuterState(_random(0)), OuterState(_random(0))
    for number in range(4):
        delayed.step_delayed(_random(number + 1), lr=0.7, momentum=0.9, every=1)
        plain.step(_random(number + 1), lr=0.7, momentum=0.9)
    assert digest(delayed.theta) == digest(plain.theta)
    assert digest(delayed.momentum) == digest(plain.momentum)


def test_a_snapshot_between_arrivals_continues_with_the_same_bits() -> None:
    """Accumulator and counter are part of the state."""
    state = OuterState(_random(0))
    assert not state.acc
    for number in range(2):
        state.step_delayed(_random(number + 1), lr=0.7, momentum=0.9, every=3)
    again = OuterState(state.theta, state.momentum, state.published, state.acc, state.arrivals)
    for each in (state, again):
        for number in range(2, 5):
            each.step_delayed(_random(number + 1), lr=0.7, momentum=0.9, every=3)
    assert digest(state.theta) == digest(again.theta)
    assert digest(state.acc) == digest(again.acc)
    with pytest.raises(MergeError, match="accumulator"):
        OuterState(_random(0), acc={"w": torch.zeros(6, 300)})


# ------------------------------------------------------------------------------------ publish


@pytest.mark.parametrize("codec", CODECS)
def test_islands_hold_the_published_bits(codec: Codec) -> None:
    """Islands that follow the packets, under every codec; under fp32 they hold theta itself."""
    state = OuterState(_random(0))
    islands = dict(state.published)
    for step in range(5):
        state.step(_random(step + 1), lr=0.7, momentum=0.9)
        islands = adopt(islands, state.publish(codec), codec)
        assert digest(islands) == digest(state.published)
    assert (digest(islands) == digest(state.theta)) == (codec == "fp32")


@pytest.mark.parametrize(("codec", "shrinks"), [("bf16", 50), ("int8", 50), ("int4", 5), ("e3m0", 2)])
def test_rounding_errors_go_with_later_packets(codec: Codec, shrinks: float) -> None:
    """Error feedback: without further steps, packets bring islands to theta."""
    state = OuterState(_random(0))
    state.step(_random(1), lr=0.7, momentum=0.9)
    state.publish(codec)
    first = delta_norm(delta(state.theta, state.published))
    assert 0 < first < 0.25 * delta_norm(delta(state.theta, _random(0)))
    state.publish(codec)
    assert delta_norm(delta(state.theta, state.published)) < first / shrinks


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.sampled_from(CODECS))
def test_rows_can_adopt_alone(cut: int, codec: Codec) -> None:
    """A rank that applies its rows of a packet holds its rows of published."""
    state = OuterState(_random(0))
    held = state.published["w"][:cut]
    state.step(_random(1), lr=0.7, momentum=0.9)
    packet = state.publish(codec)
    rows = adopt({"w": held}, {"w": packet["w"][:cut]}, codec)["w"]
    assert torch.equal(rows, state.published["w"][:cut])


def test_what_cannot_be_encoded_is_not_published() -> None:
    """A parameter that is not finite is named, and islands' values stay."""
    state = OuterState(_random(0))
    state.step(_random(1) | {"w": torch.full((6, 300), torch.inf)}, lr=0.7, momentum=0.9)
    with pytest.raises(NonFiniteTensor, match="w"):
        state.publish("int4")
    assert _same(state.published, _random(0))


# ---------------------------------------------------------------------------------- up-link, adopting


@pytest.mark.parametrize("codec", CODECS)
def test_the_residual_is_what_rounding_left_over(codec: Codec) -> None:
    """All that was sent and the last residual add up to all the deltas."""
    residual, sent, total = None, torch.zeros(6, 300), torch.zeros(6, 300)
    for seed in range(5):
        change = _random(seed)["w"]
        encoded, residual = encode_with_feedback(codec, change, residual, "w")
        sent, total = sent + decode(codec, encoded, change.shape), total + change
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=1e-5)
    assert residual.any() != (codec == "fp32")


def test_blend_mixes_and_alpha_zero_copies() -> None:
    """0.25 of the local value and 0.75 of the published one; tensors of other fragments stay."""
    local, published = (
        {"x": torch.tensor([4.0, -8.0]), "other": torch.ones(1)},
        {"x": torch.tensor([8.0, 0.0])},
    )
    here = local["x"]
    adopt_blend(local, published, 0.25)
    assert here.tolist() == [7.0, -2.0]
    here.fill_(torch.nan)
    adopt_blend(local, published, 0.0)
    assert (here.tolist(), local["other"].item()) == ([8.0, 0.0], 1.0)
    assert published["x"].tolist() == [8.0, 0.0]


def test_keep_progress_adds_what_was_done_since() -> None:
    """published + (local - snapshot), in place; without progress exactly published."""
    local = {"x": torch.tensor([4.0, -8.0])}
    here, published = local["x"], {"x": torch.tensor([8.0, 0.1])}
    adopt_keep_progress(local, published, {"x": torch.tensor([3.0, -8.0])})
    assert torch.equal(here, torch.tensor([9.0, 0.1]))
    adopt_keep_progress(local, published, local)
    assert torch.equal(here, published["x"])
