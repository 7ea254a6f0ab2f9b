"""Block codecs: error bounds of every block, exact decoding, and bytes that do not depend on the sharding."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.training.block_codec import BLOCK, MAX_SCALE, MIN_SCALE, SPAN
from elastic.training.codec import Codec, NonFiniteTensor, decode, decode_into, encode, encoded_shape, nbytes

pytestmark = pytest.mark.unit

BLOCK_CODECS: tuple[Codec, ...] = ("int8", "int4", "e3m0")
LARGEST_CODE = {"int8": 127, "int4": 7, "e3m0": 1}
STEPS = {"int8": 127.0, "int4": 7.45, "e3m0": 1.0}
codecs = pytest.mark.parametrize("codec", BLOCK_CODECS)
columns = st.sampled_from([1, 2, 3, 5, 127, 128, 129, 131, 255, 256, 257, 300, 513])
seeds = st.integers(0, 2**31)


def _values(seed: int, rows: int, width: int, heavy: bool = True) -> torch.Tensor:
    """Normal values; heavy: blocks of very different sizes, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator)
    if heavy:
        sizes = torch.randn(rows, width, generator=generator) * 8
        values = values * sizes.exp() * (torch.rand(rows, width, generator=generator) > 0.2)
    return values


def _blocks(row: torch.Tensor) -> list[torch.Tensor]:
    return list(row.split(BLOCK))


def _by_hand(codec: Codec, encoded: torch.Tensor, width: int) -> torch.Tensor:
    """Decode one row of one span, byte by byte, in fp64: the format as its page describes it."""
    blocks = -(-width // BLOCK)
    raw = encoded.tolist()
    scales = [raw[2 * i] | raw[2 * i + 1] << 8 for i in range(blocks)]
    exact = torch.tensor([bits << 16 for bits in scales], dtype=torch.int64).to(torch.int32)
    scale = exact.view(torch.float32).double()
    whole, at, codes = width // BLOCK * BLOCK, 2 * blocks, []
    for part in (whole, width - whole):
        if codec == "int8":
            codes += [byte - 256 * (byte > 127) for byte in raw[at : at + part]]
            at += part
            continue
        half = (part + 1) // 2
        payload = raw[at : at + half]
        nibbles = [byte & 15 for byte in payload] + [byte >> 4 for byte in payload][: part - half]
        codes += [_level(codec, nibble) for nibble in nibbles]
        at += half
    assert at == len(raw)
    return torch.tensor(
        [code * scale[i // BLOCK].item() for i, code in enumerate(codes)], dtype=torch.float64
    )


def _level(codec: Codec, nibble: int) -> float:
    if codec == "int4":
        return nibble - 16 * (nibble > 7)
    level = 2.0 ** ((nibble & 7) - 7) if nibble & 7 else 0.0
    return -level if nibble & 8 else level


@codecs
@settings(max_examples=30, deadline=None)
@given(seed=seeds, width=columns)
def test_decoding_is_the_exact_product_of_code_and_scale(codec: Codec, seed: int, width: int) -> None:
    """Every decoded number is code times scale, computed exactly; and both ways of decoding agree."""
    encoded = encode(codec, _values(seed, 2, width))
    decoded = decode(codec, encoded, (2, width))
    for row in range(2):
        assert torch.equal(decoded[row].double(), _by_hand(codec, encoded[row], width))
    out = torch.full((2, width), float("nan"))
    decode_into(codec, encoded, out)
    assert torch.equal(out.view(torch.int32), decoded.view(torch.int32))


@codecs
@settings(max_examples=30, deadline=None)
@given(seed=seeds, width=columns)
def test_every_value_goes_to_the_nearest_code(codec: Codec, seed: int, width: int) -> None:
    """Against a search over all codes of its block's scale, no decoded value is farther than the best.

    The search is in fp64; the codec's fp32 (and fp16 for e3m0) may differ at a tie, by 1 part in 1000.
    """
    values = _values(seed, 2, width)
    encoded = encode(codec, values)
    decoded = decode(codec, encoded, values.shape)
    ladder = {
        "int8": torch.arange(-127.0, 128.0),
        "int4": torch.arange(-7.0, 8.0),
        "e3m0": torch.tensor([0.0] + [sign * 2.0**-k for k in range(7) for sign in (-1, 1)]),
    }[codec].double()
    scales = encoded[:, : 2 * -(-width // BLOCK)].contiguous().view(torch.bfloat16).double()
    for row in range(2):
        for block, back, scale in zip(_blocks(values[row]), _blocks(decoded[row]), scales[row], strict=True):
            best = (block.double()[:, None] - ladder * scale).abs().amin(1)
            assert bool(((block - back).double().abs() <= best * 1.001 + scale * 1e-4).all())


@codecs
@settings(max_examples=30, deadline=None)
@given(seed=seeds, width=columns)
def test_errors_are_bounded_by_the_largest_value_of_the_block(codec: Codec, seed: int, width: int) -> None:
    """int8 1/254, int4 1/14.9, e3m0 1/4 of the block's maximum; a bf16 scale may be off by 1/256."""
    values = _values(seed, 3, width)
    decoded = decode(codec, encode(codec, values), values.shape)
    share = {"int8": 0.5 / 127, "int4": 0.5 / 7.45, "e3m0": 0.25}[codec]
    for row in range(3):
        for block, back in zip(_blocks(values[row]), _blocks(decoded[row]), strict=True):
            bound = block.abs().max() * share * (1 + 2**-8) * 1.0001
            assert bool(((block - back).abs() <= bound).all())


@pytest.mark.parametrize(("codec", "largest"), [("int8", 0.0066), ("int4", 0.113), ("e3m0", 0.194)])
def test_relative_error_of_normal_values(codec: Codec, largest: float) -> None:
    """The figures of docs/design/0006-codecs.md."""
    values = _values(1, 512, 512, heavy=False)
    error = decode(codec, encode(codec, values), values.shape) - values
    assert error.norm() / values.norm() < largest


@codecs
@settings(max_examples=30, deadline=None)
@given(seed=seeds, width=columns, cuts=st.lists(st.integers(0, 9), max_size=4))
def test_any_sharding_by_rows_gives_the_same_bytes_and_numbers(
    codec: Codec, seed: int, width: int, cuts: list[int]
) -> None:
    """Encoded apart and joined, or sliced out of the whole: the same bytes, and the same decoded numbers."""
    values = _values(seed, 9, width)
    whole = encode(codec, values)
    edges = [0, *sorted(cuts), 9]
    parts = [encode(codec, values[a:b]) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)
    decoded = decode(codec, whole, values.shape)
    for a, b in itertools.pairwise(edges):
        assert torch.equal(decode(codec, whole[a:b], (b - a, width)), decoded[a:b])


@codecs
def test_sharding_across_tiles_gives_the_same_bytes(codec: Codec) -> None:
    """Tensors worked on in several tiles have the bytes of their rows alone; from several threads, too."""
    values = _values(5, 1100, 300)
    whole = encode(codec, values)
    alone = torch.cat([encode(codec, values[i : i + 1]) for i in (0, 435, 436, 437, 438, 1099)])
    assert torch.equal(whole[[0, 435, 436, 437, 438, 1099]], alone)
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(lambda _: encode(codec, values), range(8)):
            assert torch.equal(again, whole)


@codecs
def test_rows_longer_than_a_span(codec: Codec) -> None:
    """Each span of a row has its own bytes behind the scales: one full span, one block, 72 values."""
    width = SPAN + 200
    values = _values(6, 2, width)
    encoded = encode(codec, values)
    payload = width if codec == "int8" else width // 2
    assert encoded.shape == (2, 2 * (SPAN // BLOCK + 2) + payload)
    decoded = decode(codec, encoded, values.shape)
    for start, stop in ((0, SPAN), (SPAN, SPAN + 128), (SPAN + 128, width)):
        part = values[:, start:stop].contiguous()
        assert torch.equal(decoded[:, start:stop], decode(codec, encode(codec, part), part.shape))


@pytest.mark.parametrize(
    ("codec", "shape", "bytes_of_a_row"),
    [
        ("int8", (3, 512), 4 * 2 + 512),
        ("int4", (3, 512), 4 * 2 + 256),
        ("e3m0", (3, 512), 4 * 2 + 256),
        ("int8", (3, 300), 3 * 2 + 300),
        ("int4", (3, 301), 3 * 2 + 128 + 23),
        ("int4", (2, 1), 2 + 1),
        ("int8", (2, 1), 2 + 1),
        ("e3m0", (2, 3, 43), 2 * 2 + 64 + 1),
        ("int8", (0, 7), 2 + 7),
        ("int4", (4, 0), 0),
        ("int4", (2, 0, 5), 0),
    ],
)
def test_sizes_are_exact(codec: Codec, shape: tuple[int, ...], bytes_of_a_row: int) -> None:
    """Two bytes a block, one or half a byte a value; encoded tensors are as large as said, and come back."""
    assert encoded_shape(codec, shape) == (shape[0], bytes_of_a_row)
    assert nbytes(codec, shape) == shape[0] * bytes_of_a_row
    values = torch.randn(shape)
    encoded = encode(codec, values)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (shape[0], bytes_of_a_row)
    assert decode(codec, encoded, shape).shape == shape


@pytest.mark.parametrize("width", [512, 513, 641, 767, 1023, 4097])
def test_four_bits_take_at_most_half_a_byte_and_a_tenth_of_that(width: int) -> None:
    """The traffic bound: 0.55 byte a value from 512 columns on."""
    assert nbytes("int4", (10, width)) <= 0.55 * 10 * width
    assert nbytes("e3m0", (10, width)) <= 0.55 * 10 * width


@codecs
def test_zeros_stay_zeros(codec: Codec) -> None:
    """Zero blocks are zero bytes, whatever is beside them."""
    values = torch.zeros(3, 300)
    assert int(encode(codec, values).count_nonzero()) == 0
    values[1, 130] = -2.5
    decoded = decode(codec, encode(codec, values), values.shape)
    assert decoded.count_nonzero() == 1
    assert decoded[1, 130].item() == pytest.approx(-2.5, rel=0.08)


@codecs
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-127, 2.0**-101])
def test_tiny_blocks_travel_as_zeros(codec: Codec, size: float) -> None:
    """Below the smallest scale (denormals included) scales are zero; a larger neighbour is not touched."""
    values = torch.full((1, 256), size)
    values[0, 200] = -size
    encoded = encode(codec, values)
    assert encoded[0, :4].tolist() == [0, 0, 0, 0]
    assert int(decode(codec, encoded, values.shape).count_nonzero()) == 0
    values[0, 128:] = 3.0
    decoded = decode(codec, encode(codec, values), values.shape)
    assert torch.equal(decoded[0, :128], torch.zeros(128))
    assert bool((decoded[0, 128:] - 3.0).abs().max() < 0.25)


@codecs
@pytest.mark.parametrize("scale", [2 * MIN_SCALE, 2.0**-60, 1.0, 2.0**60, MAX_SCALE])
def test_powers_of_two_scale_everything_alike(codec: Codec, scale: float) -> None:
    """Over the whole range of scales the payload is the same; the decoded numbers differ by that factor."""
    unit = torch.tensor([[1.0, -0.5, 0.25, 0.3, 0.0, -0.9]]) * LARGEST_CODE[codec]
    if codec == "int4":
        unit = unit * (STEPS[codec] / 7 * 1.003)
    at_one, scaled = encode(codec, unit), encode(codec, unit * scale)
    assert torch.equal(at_one[:, 2:], scaled[:, 2:])
    expected = decode(codec, at_one, unit.shape).double() * scale
    assert torch.equal(decode(codec, scaled, unit.shape).double(), expected)


def test_levels_of_e3m0_are_exact() -> None:
    """Powers of two down to 1/64 of the largest come back themselves; half of that goes to it or to zero."""
    levels = torch.tensor([[1.0, 0.5, 0.25, 0.125, 1 / 16, 1 / 32, 1 / 64, 0.0]])
    values = torch.cat([levels, -levels], 1) * 24.0
    assert torch.equal(decode("e3m0", encode("e3m0", values), values.shape), values)
    close = torch.tensor([[1.0, 0.76, 0.74, 1.02 / 128, 0.98 / 128, -1.02 / 128]])
    expected = torch.tensor([[1.0, 1.0, 0.5, 1 / 64, 0.0, -1 / 64]])
    assert torch.equal(decode("e3m0", encode("e3m0", close), close.shape), expected)


def test_adding_a_decoded_value_rounds_once() -> None:
    """What the exactness is for: with or without a fused multiply-add, `base + decoded` has the same bits."""
    values, base = _values(7, 64, 256, heavy=False), _values(8, 64, 256, heavy=False)
    for codec in BLOCK_CODECS:
        encoded = encode(codec, values)
        exact = torch.stack([_by_hand(codec, row, 256) for row in encoded])
        assert torch.equal(base + decode(codec, encoded, values.shape), (base.double() + exact).float())


@codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 127, 128, 299])
def test_non_finite_values_are_refused_by_name(codec: Codec, bad: float, column: int) -> None:
    """One Inf or NaN in any block, whole or short, refuses the tensor."""
    values = torch.ones(4, 300)
    values[2, column] = bad
    with pytest.raises(NonFiniteTensor, match=r"head\.weight.*1 Inf or NaN of 1200"):
        encode(codec, values, "head.weight")


@codecs
def test_values_beyond_the_largest_scale_are_refused_by_name(codec: Codec) -> None:
    """Finite, but absurd: near the end of fp32 a block codec refuses instead of overflowing."""
    for size in (3.4e38, MAX_SCALE * STEPS[codec] * 1.01):
        with pytest.raises(NonFiniteTensor, match=rf"head\.weight: values are too large for {codec}"):
            encode(codec, torch.full((1, 3), size), "head.weight")


@codecs
def test_views_and_cubes_are_their_values(codec: Codec) -> None:
    """Transposed and sliced inputs, three dimensions, parameters with gradients, slices of encoded rows."""
    values = _values(9, 12, 35)
    assert torch.equal(encode(codec, values.T), encode(codec, values.T.contiguous()))
    assert torch.equal(encode(codec, values[::2]), encode(codec, values[::2].contiguous()))
    cube = values.reshape(12, 5, 7)
    assert torch.equal(encode(codec, cube), encode(codec, values))
    decoded = decode(codec, encode(codec, cube), cube.shape)
    assert torch.equal(decoded.flatten(1), decode(codec, encode(codec, values), values.shape))
    parameter = torch.nn.Parameter(values)
    assert torch.equal(encode(codec, parameter), encode(codec, values))
    assert torch.equal(decode(codec, encode(codec, values)[::3], (4, 35)), decoded.flatten(1)[::3])
