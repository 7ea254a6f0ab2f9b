"""Counts from the configuration equal those of the model that is built from it."""

from __future__ import annotations

import pytest

from elastic.base.config import DecoderModel, Job
from elastic.base.resolve import resolve_job
from elastic.policy.sizes import bytes_per_outer_step, count_parameters, ffn_width, flops_per_token, kv_heads

pytestmark = pytest.mark.unit

MODELS = [
    DecoderModel(d_model=64, num_layers=2, num_heads=4),
    DecoderModel(d_model=96, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=100, tied_head=False),
    DecoderModel(d_model=64, num_layers=1, num_heads=2, qk_norm=True),
]


def test_a_count_by_hand():
    """Every term of a tiny decoder, written out."""
    model = DecoderModel(d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16, tied_head=False)
    count = count_parameters(model, vocab_size=10)
    q, k, v, o, ffn, norms = 8 * 8, 8 * 4, 8 * 4, 8 * 8, 3 * 8 * 16, 2 * 8
    assert count.per_block == q + k + v + o + ffn + norms
    assert count.blocks == 2 * count.per_block
    assert (count.embedding, count.head) == (80, 80)
    assert count.total == 80 + 2 * count.per_block + 8 + 80
    assert count.vectors == 2 * norms + 8


@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_the_real_model(model):
    """The decoder built from the same configuration has exactly these parameters."""
    pytest.importorskip("torch")
    from elastic.training.model import build_model

    built = build_model(model, 257, 32, 0)
    real = {id(parameter): parameter for parameter in built.parameters()}.values()
    count = count_parameters(model, 257)
    assert count.total == sum(parameter.numel() for parameter in real)
    assert count.vectors == sum(parameter.numel() for parameter in real if parameter.ndim == 1)


@pytest.mark.parametrize("model", MODELS)
def test_derived_widths_are_those_of_the_resolved_job(model):
    """A model counts the same before and after its derived values are filled in."""
    resolved = resolve_job(Job(name="x", budget={"tokens": 1}, model=model)).value.model
    assert isinstance(resolved, DecoderModel)
    assert (kv_heads(model), ffn_width(model)) == (resolved.num_kv_heads, resolved.ffn_dim)
    assert count_parameters(model, 257) == count_parameters(resolved, 257)


def test_known_models_have_their_known_size():
    """Llama-3-70B has 70.55e9 parameters, and a little more than 6 N FLOPs a token."""
    llama = DecoderModel(
        d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, tied_head=False
    )
    count = count_parameters(llama, 128_256)
    assert count.total == pytest.approx(70.55e9, rel=1e-4)
    flops = flops_per_token(llama, 128_256, seq_len=8192)
    assert flops == 6 * (count.total - count.embedding - count.vectors) + 12 * 80 * 8192 * 8192


def test_bytes_follow_the_codec_and_norms_travel_in_fp32():
    """bf16 halves the matrices and leaves 1-D tensors alone."""
    count = count_parameters(MODELS[0], 257)
    assert bytes_per_outer_step(count, "fp32") == 4 * count.total
    assert bytes_per_outer_step(count, "bf16") == 2 * count.total + 2 * count.vectors
