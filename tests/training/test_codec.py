"""Codecs: exact bytes, exact bits, and refusal of bad numbers by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.codec import NonFiniteTensor, check_finite, decode, encode, nbytes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("codec", "bytes_each"), [("fp32", 4), ("bf16", 2)])
def test_nbytes_is_what_the_encoded_tensor_takes(codec: str, bytes_each: int) -> None:
    """`nbytes` equals the size of the encoded tensor, for matrices and for one dimension or none."""
    for shape in ((3, 5), (7,), (), (0, 4)):
        encoded = encode(codec, torch.ones(shape))
        assert encoded.nbytes == nbytes(codec, encoded.numel(), encoded.ndim)
    assert nbytes(codec, 100) == 100 * bytes_each


def test_fp32_is_the_tensor_itself() -> None:
    """The fp32 codec neither copies nor changes."""
    tensor = torch.randn(4, 4)
    assert encode("fp32", tensor) is tensor
    assert decode(tensor) is tensor


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(0, 20))
def test_bf16_error_is_bounded_and_rows_travel_alone(values: list[float], cut: int) -> None:
    """A bf16 value is within 2^-8 of itself, and rows encoded apart have the bits of the whole."""
    tensor = torch.tensor(values)[:, None]
    back = decode(encode("bf16", tensor))
    assert bool(((back - tensor).abs() <= tensor.abs() * 2**-8 + 1e-38).all())
    parts = [decode(encode("bf16", rows)) for rows in (tensor[:cut], tensor[cut:])]
    assert torch.equal(torch.cat(parts), back)


def test_one_dimensional_tensors_travel_in_fp32() -> None:
    """Norms and biases are exact under every codec."""
    tensor = torch.randn(9)
    assert torch.equal(decode(encode("bf16", tensor)), tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_non_finite_values_are_refused_by_name(codec: str, bad: float) -> None:
    """An Inf or a NaN names its tensor and says how many there are."""
    tensor = torch.ones(3, 4)
    tensor[1, 2] = bad
    with pytest.raises(NonFiniteTensor, match=r"head\.weight.*1 Inf or NaN of 12"):
        encode(codec, tensor, "head.weight")


def test_overflow_of_the_wire_type_is_refused() -> None:
    """A finite fp32 value that bf16 can only hold as Inf is refused, not sent."""
    with pytest.raises(NonFiniteTensor):
        encode("bf16", torch.full((2, 2), 3.4e38), "x")


def test_a_large_finite_tensor_passes() -> None:
    """A sum that overflows does not make finite values suspicious."""
    check_finite(torch.full((8,), 3e38), "x")
    check_finite(torch.empty(0), "x")
