"""The inner optimiser: one big batch's gradient at any number of workers, exact state, safe steps."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elastic
from elastic.base import config
from elastic.base.errors import ElasticError
from elastic.training.assemble import assemble
from elastic.training.digest import digest
from elastic.training.inner import Inner, NonFiniteGradient
from elastic.training.model import build_model

pytestmark = pytest.mark.unit

VOCAB, SEQ_LEN = 61, 12
DECODER = config.DecoderModel(d_model=16, num_layers=2, num_heads=2, ffn_dim=20)


def _inner(model: nn.Module | None = None, seed: int = 0, **changes: Any) -> Inner:
    cfg = config.Inner(**{"batch_sequences": 7, "micro_batch_sequences": 2, **changes})
    return Inner(model or build_model(DECODER, VOCAB, SEQ_LEN, seed=5), cfg, seed=seed)


def _batch(seed: int, size: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (size, SEQ_LEN + 1))


def _train(inner: Inner, seeds: range) -> None:
    for seed in seeds:
        inner.gradient(_batch(seed))
        inner.clip()
        inner.step(1e-2)


def _state(inner: Inner) -> str:
    tensors = dict(inner.local())
    for name, (first, second) in inner.moments().items():
        tensors |= {f"m/{name}": first, f"v/{name}": second}
    return digest(tensors)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --------------------------------------------------------------------------- several workers


Ranks = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """The results of all scenarios of ranks.py in 1, 2 and 3 real ranks, by world size, then rank."""
    out = tmp_path_factory.mktemp("ranks")
    worlds = [1, 2, 3]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ranks.py")), str(out), *map(str, worlds)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(elastic.__file__).parents[1])},
        start_new_session=True,  # so that a hang can be ended with all its ranks
    )
    try:
        _, errors = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors[-4000:]
    return {
        world: [torch.load(out / f"w{world}-r{rank}.pt", weights_only=True) for rank in range(world)]
        for world in worlds
    }


def _largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.timeout(300)
def test_one_two_and_three_workers_agree(ranks: Ranks) -> None:
    """After 20 steps on uneven and padded batches, parameters, moments, gradients, norms and losses
    of 1, 2 and 3 workers agree within 1e-5, for awkward parameters too; frozen ones did not move.
    """
    for model in ("decoder", "odd"):
        alone = ranks[1][0]["agree"][model]
        for world, results in ranks.items():
            mine = [rank["agree"][model] for rank in results]
            for what in ("seen", "evaluation", "tiny_evaluation"):
                assert all(rank[what] == mine[0][what] for rank in mine), f"{world} workers differ in {what}"
            for key in ("parameters", "gradient"):
                whole = assemble([rank[key] for rank in mine], alone["shapes"])
                assert _largest_gap(whole, {n: t for n, (_, t) in alone[key].items()}) < 1e-5
            for moment in (0, 1):
                whole = assemble([rank["moments"][moment] for rank in mine], alone["shapes"])
                assert _largest_gap(whole, {n: t for n, (_, t) in alone["moments"][moment].items()}) < 1e-5
            np.testing.assert_allclose(mine[0]["seen"], alone["seen"], rtol=1e-5)
            assert mine[0]["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-6)
            assert mine[0]["tiny_evaluation"] == pytest.approx(alone["tiny_evaluation"], rel=1e-6)
            assert all(rank["frozen_moved"] == [] and rank["steps"] == 20 for rank in mine)
    odd = [rank["agree"]["odd"] for rank in ranks[3]]
    assert odd[0]["frozen"] == ["frozen.weight"]
    assert [rank["rows"]["narrow.weight"] for rank in odd] == [(0, 1), (1, 1), (1, 1)]
    assert [rank["rows"]["embedding.weight"] for rank in odd] == [(0, 21), (21, 42), (42, 61)]


@pytest.mark.timeout(300)
def test_equal_merged_gradients_give_equal_bits_at_any_number_of_workers(ranks: Ranks) -> None:
    """The synchronous phase: 30 steps on the same merged gradient end in one digest of parameters
    and moments, whether the island has 1, 2 or 3 workers.
    """
    digests = set()
    for world in ranks.values():
        results = [rank["merged"] for rank in world]
        shapes = results[0]["shapes"]
        tensors = [assemble([rank["parameters"] for rank in results], shapes)]
        tensors += [assemble([rank["moments"][i] for rank in results], shapes) for i in (0, 1)]
        digests.add(tuple(map(digest, tensors)))
    assert len(digests) == 1


@pytest.mark.timeout(300)
def test_a_nan_of_one_rank_stops_all_ranks_before_the_step(ranks: Ranks) -> None:
    """A NaN on the last rank raises the same NonFiniteGradient, with its name, on every rank."""
    results = [rank["poisoned"] for rank in ranks[3]]
    assert len({rank["message"] for rank in results}) == 1
    assert "blocks.1.ffn.down.weight" in results[0]["message"]
    assert all(rank["same"] and rank["steps"] == 0 for rank in results)


@pytest.mark.timeout(300)
def test_bf16_passes_keep_fp32_state(ranks: Ranks) -> None:
    """With bf16 compute, sharded or not, master weights, gradients and moments are fp32."""
    results = {world: [rank["bf16"] for rank in by_rank] for world, by_rank in ranks.items()}
    assert all(rank["dtypes"] == ["torch.float32"] for world in results.values() for rank in world)
    np.testing.assert_allclose(results[1][0]["seen"], results[2][0]["seen"], rtol=0.05)


@pytest.mark.timeout(300)
def test_state_continues_at_any_number_of_workers(ranks: Ranks) -> None:
    """Parameters and moments of one worker continue on 1, 2 and 3 workers alike, within 1e-6."""
    straight = ranks[1][0]["reshard"]
    for world in (2, 3):
        results = [rank["reshard"] for rank in ranks[world]]
        resharded = assemble([rank["parameters"] for rank in results], straight["shapes"])
        assert _largest_gap({n: t for n, (_, t) in straight["parameters"].items()}, resharded) < 1e-6
        assert all(rank["steps"] == 6 for rank in results)


# ----------------------------------------------------------------------------- one process


def test_micro_batches_and_padding_give_the_gradient_of_one_big_batch() -> None:
    """Ragged rows, one of them all padding, in any micro-batches: the gradient of the token mean."""
    batch = _batch(1, 4)
    batch[0, 3:], batch[1, 9:], batch[3, 1:] = -1, -1, -1
    model = build_model(DECODER, VOCAB, SEQ_LEN, seed=5)
    plain = copy.deepcopy(model)
    tokens, targets = torch.from_numpy(batch[:, :-1]).clamp(min=0), torch.from_numpy(batch[:, 1:])
    loss = nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for micro in (1, 2, 3, 4):
        inner = _inner(model, micro_batch_sequences=micro)
        share = inner.gradient(batch)
        assert share.tokens == inner.batch_tokens == 2 + 8 + 12 + 0
        assert _largest_gap(inner.gradients(), expected) < 1e-6
        inner.clip()
        assert inner.batch_loss == pytest.approx(loss.item(), rel=1e-6)
        assert float(share.total) == pytest.approx(loss.item() * share.tokens, rel=1e-6)


def test_an_empty_batch_is_a_zero_gradient() -> None:
    """No sequences: no tokens, a zero gradient, no error."""
    inner = _inner()
    assert inner.gradient(_batch(0, 0)).tokens == 0
    assert all(not t.any() for t in inner.gradients().values())
    assert inner.clip() == 0.0


def test_it_learns() -> None:
    """Forty steps on one batch bring its loss far below that of a uniform guess."""
    inner = _inner()
    for _ in range(40):
        inner.gradient(_batch(0))
        inner.clip()
        inner.step(1e-2)
    loss_sum, tokens = inner.evaluate(_batch(0))
    assert tokens == 7 * SEQ_LEN
    assert loss_sum / tokens < 0.5 * np.log(VOCAB)


def test_clip_scales_to_the_norm_and_reports_the_old_one() -> None:
    """The returned norm is that before clipping; afterwards the gradient has norm `clip_norm`."""
    inner = _inner(clip_norm=0.01)
    inner.gradient(_batch(0))
    before = {name: t.clone() for name, t in inner.gradients().items()}
    norm = inner.clip()
    reference = torch.nn.utils.get_total_norm(before.values()).item()
    assert norm == pytest.approx(reference, rel=1e-5)
    after = torch.nn.utils.get_total_norm(inner.gradients().values()).item()
    assert after == pytest.approx(0.01, rel=1e-3)
    gentle = _inner(clip_norm=1e6)
    gentle.gradient(_batch(0))
    gentle.clip()
    assert all(torch.equal(t, before[name]) for name, t in gentle.gradients().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_is_named_and_not_stepped(bad: float) -> None:
    """NaN and Inf raise with the parameter's name; parameters and moments keep their bits."""
    inner = _inner()
    before = _state(inner)
    inner.gradient(_batch(0))
    inner.gradients()["blocks.0.attention.q.weight"][0, 0] = bad
    with pytest.raises(NonFiniteGradient, match=r"blocks\.0\.attention\.q\.weight.*inner step 1"):
        inner.clip()
    assert _state(inner) == before
    with pytest.raises(NonFiniteGradient, match="merged gradient"):
        inner.clip(norm=float("nan"))


def test_frozen_parameters_do_not_move() -> None:
    """Under weight decay frozen parameters keep their bits and are neither listed nor sent."""
    model = build_model(DECODER, VOCAB, SEQ_LEN, seed=5)
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    inner = _inner(model, weight_decay=0.5)
    _train(inner, range(5))
    assert torch.equal(model.embedding.weight, before)
    for names in (inner.local(), inner.moments(), inner.shapes, inner.gradients()):
        assert "embedding.weight" not in names


def test_weight_decay_is_on_matrices_only() -> None:
    """With a zero gradient matrices shrink by 1 - lr*wd, and norms keep their bits."""
    inner = _inner(weight_decay=0.5)
    before = {name: t.clone() for name, t in inner.local().items()}
    inner.set_gradients({name: torch.zeros_like(t) for name, t in before.items()})
    inner.step(0.1)
    for name, tensor in inner.local().items():
        expected = before[name] * (1.0 - 0.1 * 0.5) if tensor.ndim >= 2 else before[name]
        assert torch.equal(tensor, expected)


# ----------------------------------------------------------------------------------- state


def test_moments_exist_from_the_start() -> None:
    """Before any step there is a zero moment for every parameter, and the count is 0."""
    inner = _inner()
    assert inner.steps == 0
    assert inner.moments().keys() == inner.local().keys()
    assert all(not m.any() and not v.any() for m, v in inner.moments().values())


def test_five_and_five_steps_are_ten_and_not_a_cold_start() -> None:
    """Saved and loaded halfway, the end has the bits of the straight run; without moments it has not."""
    straight = _inner()
    _train(straight, range(5))
    parameters = {name: t.clone() for name, t in straight.local().items()}
    moments = {name: (m.clone(), v.clone()) for name, (m, v) in straight.moments().items()}
    steps = straight.steps
    _train(straight, range(5, 10))

    resumed, cold = _inner(), _inner()
    for inner in (resumed, cold):
        for name, tensor in inner.local().items():
            tensor.copy_(parameters[name])
    resumed.load_moments(moments, steps)
    for inner in (resumed, cold):
        _train(inner, range(5, 10))
    assert _state(resumed) == _state(straight)
    assert resumed.steps == 10
    assert _state(cold) != _state(straight)


def test_partial_state_is_refused() -> None:
    """Missing, unknown or misshapen moments and gradients raise with their names."""
    inner = _inner()
    moments = dict(inner.moments())
    missing = {name: pair for name, pair in moments.items() if name != "final_norm.weight"}
    with pytest.raises(ElasticError, match=r"missing \['final_norm.weight'\]"):
        inner.load_moments(missing, 3)
    with pytest.raises(ElasticError, match=r"unknown \['ghost'\]"):
        inner.load_moments(moments | {"ghost": moments["final_norm.weight"]}, 3)
    with pytest.raises(ElasticError, match=r"final_norm\.weight.*\[4\]"):
        inner.load_moments(moments | {"final_norm.weight": (torch.zeros(4), torch.zeros(4))}, 3)
    with pytest.raises(ElasticError, match="gradients"):
        inner.set_gradients({})
    assert inner.steps == 0


def test_set_gradients_copies() -> None:
    """Clipping after `set_gradients` leaves the caller's tensors alone."""
    inner = _inner(clip_norm=1e-3)
    rows = {name: torch.ones_like(t) for name, t in inner.local().items()}
    inner.set_gradients(rows)
    inner.clip()
    assert all(bool((t == 1).all()) for t in rows.values())


def test_a_step_needs_a_gradient() -> None:
    """`step` twice on one gradient is a mistake, not a second step."""
    inner = _inner()
    _train(inner, range(1))
    with pytest.raises(RuntimeError, match="gradient"):
        inner.step(1e-2)


def test_evaluate_changes_nothing_and_is_the_plain_loss() -> None:
    """Evaluation gives the plain loss sum, whatever the micro-batches, and leaves no gradient."""
    model = build_model(DECODER, VOCAB, SEQ_LEN, seed=5)
    batch = _batch(0, 5)
    logits = model(torch.from_numpy(batch[:, :-1]))
    targets = torch.from_numpy(batch[:, 1:]).flatten()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    for micro in (1, 2, 5):
        inner = _inner(model, micro_batch_sequences=micro)
        before = _state(inner)
        assert inner.evaluate(batch) == (pytest.approx(expected, rel=1e-6), 5 * SEQ_LEN)
        assert _state(inner) == before
    assert all(p.grad is None for p in model.parameters())


class Dropping(nn.Module):
    """A model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.embedding(tokens), 0.5, self.training))


def test_dropout_depends_on_seed_and_step_alone() -> None:
    """Dropout repeats after a resume, differs between steps and seeds, leaves the process's random
    state alone, and is off in evaluation.
    """
    torch.manual_seed(0)
    model = Dropping()
    before = torch.get_rng_state()
    same, again, other = (_inner(copy.deepcopy(model), seed=seed) for seed in (1, 1, 2))
    for inner in (same, again, other):
        inner.gradient(_batch(0))
    assert digest(same.gradients()) == digest(again.gradients())
    assert digest(same.gradients()) != digest(other.gradients())
    first = digest(again.gradients())
    again.step(1e-30)
    again.gradient(_batch(0))
    assert digest(again.gradients()) != first
    assert same.evaluate(_batch(0)) == same.evaluate(_batch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forgotten_shard_is_named() -> None:
    """Several workers without a mesh raise at once instead of training apart."""
    with pytest.raises(ValueError, match="2 workers need a mesh"):
        Inner(build_model(DECODER, VOCAB, SEQ_LEN, seed=5), config.Inner(), world_size=2)
