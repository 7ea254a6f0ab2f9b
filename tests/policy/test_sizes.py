"""Counts from the configuration equal those of the model that is built from it."""

from __future__ import annotations

from typing import get_args

import pytest

from elastic.base.config import DecoderModel, Job
from elastic.base.outer_config import Codec
from elastic.base.resolve import resolve_job
from elastic.policy.sizes import (
    BLOCK,
    bytes_per_outer_step,
    count_parameters,
    decoder_shapes,
    encoded_bytes,
    ffn_width,
    flops_per_token,
    kv_heads,
)

pytestmark = pytest.mark.unit

MODELS = [
    DecoderModel(d_model=64, num_layers=2, num_heads=4),
    DecoderModel(d_model=96, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=100, tied_head=False),
    DecoderModel(d_model=64, num_layers=1, num_heads=2, qk_norm=True),
    DecoderModel(d_model=512, num_layers=1, num_heads=4, ffn_dim=401),  # full, short and odd blocks
]
CODECS: tuple[Codec, ...] = get_args(Codec)


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
    # embedding, head, and q, k, v, o, gate, up of two blocks have 8 columns; down of two blocks 16
    assert count.matrices == ((10 + 10 + 2 * (8 + 4 + 4 + 8 + 16 + 16), 8), (2 * 8, 16))


@pytest.mark.parametrize("model", MODELS)
def test_counts_equal_the_real_model(model):
    """The decoder built from the same configuration has exactly these parameters."""
    pytest.importorskip("torch")
    from elastic.training.model import build_model

    built = build_model(model, 257, 32, 0)
    real = dict(built.named_parameters())
    assert list(decoder_shapes(model, 257).items()) == [(name, tuple(p.shape)) for name, p in real.items()]
    count = count_parameters(model, 257)
    assert count.total == sum(parameter.numel() for parameter in real.values())
    assert count.vectors == sum(parameter.numel() for parameter in real.values() if parameter.ndim == 1)
    assert count.total == count.vectors + sum(rows * columns for rows, columns in count.matrices)


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


def test_encoded_bytes_by_hand():
    """Per row: a two-byte scale for each started block of 128, a byte or half a byte a value, rounded up."""
    shape = (3, 2 * BLOCK + 5)
    assert encoded_bytes("int8", shape) == 3 * (3 * 2 + 261)
    assert encoded_bytes("int4", shape) == encoded_bytes("e3m0", shape) == 3 * (3 * 2 + 131)
    assert encoded_bytes("bf16", shape) == 3 * 261 * 2
    assert encoded_bytes("int4", (2, 3, 50)) == 2 * (2 * 2 + 75)  # a row is all but the first dimension
    assert {encoded_bytes(codec, (7,)) for codec in CODECS} == {28}
    assert {encoded_bytes(codec, ()) for codec in CODECS} == {4}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_those_of_the_real_codec(model, codec):
    """What the plan says is, tensor by tensor and together, what the codec makes of the real shapes."""
    pytest.importorskip("torch")
    from elastic.training.codec import nbytes
    from elastic.training.model import build_model

    real = [tuple(parameter.shape) for parameter in build_model(model, 257, 32, 0).parameters()]
    for shape in [*real, (), (0,), (2, 3, 50), (4, 3, 3, 3), (5, 0)]:
        assert encoded_bytes(codec, shape) == nbytes(codec, shape), shape
    expected = sum(nbytes(codec, shape) for shape in real)
    assert bytes_per_outer_step(count_parameters(model, 257), codec) == expected


def test_four_bits_cost_little_more_than_half_a_byte():
    """For the 70B model: 4 bits, a scale of 16 bits for 128 values, and the norms: 0.516 bytes each."""
    llama = DecoderModel(
        d_model=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_dim=28672, tied_head=False
    )
    count = count_parameters(llama, 128_256)
    assert bytes_per_outer_step(count, "int4") / count.total == pytest.approx(0.5 + 2 / 128, rel=1e-3)
