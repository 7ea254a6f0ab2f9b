"""Codecs: exact bytes, exact bits, and refusal of bad numbers by name. test_block_codec.py has the blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.codec import (
    Codec,
    NonFiniteTensor,
    check_finite,
    decode,
    decode_into,
    encode,
    encoded_shape,
    nbytes,
    wire_dtype,
)

pytestmark = pytest.mark.unit

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "int4", "e3m0")
every_codec = pytest.mark.parametrize("codec", CODECS)


@pytest.mark.parametrize(
    ("codec", "matrix", "cube"),
    [("fp32", 60, 96), ("bf16", 30, 48), ("int8", 3 * 7, 2 * 14), ("int4", 3 * 5, 2 * 8), ("e3m0", 15, 16)],
)
def test_nbytes_is_what_the_encoded_tensor_takes(codec: Codec, matrix: int, cube: int) -> None:
    """Derived by hand for [3, 5] and [2, 3, 4]; vectors and scalars take four bytes a value."""
    for shape, expected in (((3, 5), matrix), ((2, 3, 4), cube), ((7,), 28), ((), 4), ((0, 4), 0)):
        encoded = encode(codec, torch.ones(shape))
        assert encoded.nbytes == nbytes(codec, shape) == expected
        assert encoded.shape == encoded_shape(codec, shape)
        assert encoded.dtype == wire_dtype(codec, len(shape))


def test_fp32_is_the_tensor_itself() -> None:
    """The fp32 codec neither copies nor changes."""
    tensor = torch.randn(4, 4)
    assert encode("fp32", tensor) is tensor
    assert decode("fp32", tensor, (4, 4)) is tensor


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(0, 20))
def test_bf16_error_is_bounded_and_rows_travel_alone(values: list[float], cut: int) -> None:
    """A bf16 value is within 2^-8 of itself, and rows encoded apart have the bits of the whole."""
    tensor = torch.tensor(values)[:, None]
    back = decode("bf16", encode("bf16", tensor), tensor.shape)
    assert bool(((back - tensor).abs() <= tensor.abs() * 2**-8 + 1e-38).all())
    parts = [decode("bf16", encode("bf16", rows), rows.shape) for rows in (tensor[:cut], tensor[cut:])]
    assert torch.equal(torch.cat(parts), back)


def test_bf16_is_what_torch_rounds_to() -> None:
    """In several runs, of any layout; an Inf anywhere is found."""
    tensor = torch.randn(700, 400)
    assert torch.equal(encode("bf16", tensor), tensor.bfloat16())
    assert torch.equal(encode("bf16", tensor.T), tensor.T.bfloat16())
    tensor[699, 399] = float("inf")
    with pytest.raises(NonFiniteTensor, match="1 Inf or NaN of 280000"):
        encode("bf16", tensor, "x")
    assert encode("bf16", torch.full((8, 8), 3e38)).isfinite().all()


@every_codec
def test_tensors_of_one_dimension_or_none_travel_in_fp32(codec: Codec) -> None:
    """Norms and biases are exact under every codec."""
    for tensor in (torch.randn(9), torch.tensor(-1.5), torch.tensor([1e-42, 3e38])):
        encoded = encode(codec, tensor)
        assert torch.equal(encoded, tensor)
        assert torch.equal(decode(codec, encoded, tensor.shape), tensor)


@every_codec
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (6,), (), (0, 4), (1, 1)])
def test_decoding_into_a_tensor_is_decoding(codec: Codec, shape: tuple[int, ...]) -> None:
    """The same bits, in memory that was there before."""
    encoded = encode(codec, torch.randn(shape))
    out = torch.full(shape, float("nan"))
    decode_into(codec, encoded, out)
    assert torch.equal(out, decode(codec, encoded, shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_codec
@pytest.mark.parametrize("shape", [(3, 4), (12,)])
def test_non_finite_values_are_refused_by_name(codec: Codec, bad: float, shape: tuple[int, ...]) -> None:
    """An Inf or a NaN names its tensor and says how many there are."""
    tensor = torch.ones(12)
    tensor[6] = bad
    with pytest.raises(NonFiniteTensor, match=r"head\.weight.*1 Inf or NaN of 12"):
        encode(codec, tensor.view(shape), "head.weight")


@pytest.mark.parametrize("codec", CODECS[1:])
def test_overflow_of_the_wire_type_is_refused(codec: Codec) -> None:
    """A finite fp32 value that the codec cannot hold is refused, not sent as Inf."""
    with pytest.raises(NonFiniteTensor):
        encode(codec, torch.full((2, 2), 3.4e38), "x")


def test_a_large_finite_tensor_passes() -> None:
    """A sum that overflows does not make finite values suspicious."""
    check_finite(torch.full((8,), 3e38), "x")
    check_finite(torch.empty(0), "x")
