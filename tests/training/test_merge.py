"""Merging contributions, and putting the ranks' parts together."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.training import chunks
from elastic.training.assemble import MergeError, assemble
from elastic.training.codec import Codec, NonFiniteTensor, decode, encode
from elastic.training.digest import digest
from elastic.training.merge import Encoded, MergeKind, merge

pytestmark = pytest.mark.unit

CODECS = get_args(Codec)
KINDS = get_args(MergeKind)
SMALL = {"w": (6, 5), "b": (5,), "s": ()}
SHAPES = {"w": (40, 300), "wide": (3, 4500), "experts": (4, 6, 50), "b": (7,), "s": (), "none": (0, 4)}


def _random(seed: int, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in (shapes or SMALL).items()}


def _whole(tensors: dict[str, Tensor], codec: Codec = "fp32") -> Encoded:
    """A contribution of one rank; fp32 is its own form, unchecked."""
    form = tensors if codec == "fp32" else {name: encode(codec, t, name) for name, t in tensors.items()}
    return Encoded(codec, [{name: (0, encoded) for name, encoded in form.items()}])


def _cut(tensors: dict[str, Tensor], codec: Codec, draw: random.Random) -> Encoded:
    """The same contribution from four ranks, cut anywhere: each encodes its own rows."""
    parts: list[dict[str, tuple[int, Tensor]]] = [{}, {}, {}, {}]
    for name, value in tensors.items():
        if not value.ndim:
            parts[draw.randrange(4)][name] = (0, value)
            continue
        edges = [0, *sorted(draw.randrange(len(value) + 1) for _ in range(3)), len(value)]
        pieces = [(a, encode(codec, value[a:b], name)) for a, b in itertools.pairwise(edges)]
        draw.shuffle(pieces)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return Encoded(codec, parts)


def _one(*values: list[float]) -> list[Encoded]:
    return [_whole({"x": torch.tensor([value])}) for value in values]


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


# --------------------------------------------------------------------------------------- mean


def test_weights_are_taken_as_given() -> None:
    """0.8 * 10 + 0.1 * 5; what is lacking to one shrinks the step, and weight 0 is left out unread."""
    deltas = _one([10.0], [5.0], [math.nan])
    assert merge(deltas, [0.8, 0.1, 0.0], {"x": (1, 1)})["x"].item() == pytest.approx(8.5)


def test_equal_weights_are_the_plain_mean() -> None:
    """Two halves give exactly the mean."""
    first, second = _random(1), _random(2)
    expected = {name: first[name] * 0.5 + second[name] * 0.5 for name in SMALL}
    assert _same(merge([_whole(first), _whole(second)], [0.5, 0.5], SMALL), expected)


@pytest.mark.parametrize("codec", CODECS)
def test_one_contribution_is_itself(codec: Codec) -> None:
    """The mean of one, with weight one, is exactly what decoding gives."""
    tensors = _random(1, SHAPES)
    expected = {name: decode(codec, encode(codec, t), t.shape) for name, t in tensors.items()}
    assert _same(merge([_whole(tensors, codec)], [1.0], SHAPES), expected)


@pytest.mark.parametrize(("codec", "error"), [("fp32", 2e-7), ("bf16", 2e-7), ("int8", 1e-5), ("int4", 5e-7)])
def test_the_mean_is_that_of_the_decoded_values(codec: Codec, error: float) -> None:
    """Against fp64, off by no more than the rounding of weights and sums, in units of sum(w * |v|)."""
    deltas, weights = [_random(seed, SHAPES) for seed in range(5)], [0.31, 0.07, 0.2, 0.113, 0.3]
    merged = merge([_whole(tensors, codec) for tensors in deltas], weights, SHAPES)
    for name, shape in SHAPES.items():
        terms = [
            w * decode(codec, encode(codec, t[name]), shape).double()
            for w, t in zip(weights, deltas, strict=True)
        ]
        wrong = (merged[name].double() - sum(terms)).abs()
        assert bool((wrong <= error * sum(term.abs() for term in terms)).all()), name


def test_merge_does_not_touch_its_inputs() -> None:
    """Contributions can be kept and merged again."""
    first, second = _random(1), _random(2)
    again = merge([_whole(first), _whole(second)], [0.75, 0.25], SMALL)
    assert _same(first, _random(1))
    assert _same(again, merge([_whole(_random(1)), _whole(_random(2))], [0.75, 0.25], SMALL))


# ------------------------------------------------------------------------------- same bits always


@pytest.mark.parametrize(("codec", "kind"), list(itertools.product(CODECS, KINDS)))
def test_bits_depend_neither_on_the_ranks_nor_on_the_chunks(
    codec: Codec, kind: MergeKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows cut anywhere, each contribution its own way, and chunks of 1 to 1000 values: one digest."""
    deltas, weights = [_random(seed, SHAPES) for seed in range(4)], [0.3, 0.3, 0.21, 0.1]
    expected = digest(merge([_whole(t, codec) for t in deltas], weights, SHAPES, kind, {"wide"}))
    for size in (1, 130, 1000):
        monkeypatch.setattr(chunks, "CHUNK", size)
        draw = random.Random(size)
        cut = [_cut(tensors, codec, draw) for tensors in deltas]
        assert digest(merge(cut, weights, SHAPES, kind, {"wide"})) == expected, size


ON_ANY_MACHINE = """
import torch
from elastic.training.codec import encode
from elastic.training.digest import digest
from elastic.training.merge import Encoded, merge
g = torch.Generator().manual_seed(1)
for codec in ("fp32", "bf16", "int8", "int4", "e3m0"):
    for kind in ("mean", "rda", "trimmed"):
        bits = [torch.randint(-9999, 9999, (33, 301), generator=g) for _ in range(5)]
        deltas = [Encoded(codec, [{"w": (0, encode(codec, b.float() / 7777))}]) for b in bits]
        print(codec, kind, digest(merge(deltas, [0.23, 0.19, 0.17, 0.13, 0.11], {"w": (33, 301)}, kind)))
"""


def test_bits_do_not_depend_on_the_processor() -> None:
    """With and without vector instructions and fused multiply-add."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", ON_ANY_MACHINE],
            env={**os.environ, **more, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for more in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    ]
    native, plain = (run.communicate(timeout=60)[0].splitlines() for run in runs)
    assert len(native) == 15
    assert native == plain


# ------------------------------------------------------------------------------------ rda, trimmed


def test_rda_is_the_mean_length_along_the_mean_direction() -> None:
    """(3, 4) and (0, 10): length 7.5 along (0.3, 0.9); half of the weights is half of the step."""
    deltas, shapes = _one([3.0, 4.0], [0.0, 10.0]), {"x": (1, 2)}
    whole = merge(deltas, [0.5, 0.5], shapes, "rda")["x"]
    expected = torch.tensor([[7.5 * 0.3, 7.5 * 0.9]]) / math.sqrt(0.9)
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(merge(deltas, [0.25, 0.25], shapes, "rda")["x"], whole / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        merge(deltas, [0.5, 0.5], shapes, "rda", {"x"})["x"], torch.tensor([[1.5, 7.0]])
    )


def test_rda_gives_zeros_no_direction() -> None:
    """A zero delta only shortens; zeros alone, and opposite deltas, give zero; tiny ones do not overflow."""
    shapes = {"x": (1, 2)}
    halved = merge(_one([0.0, 0.0], [3.0, 4.0]), [0.5, 0.5], shapes, "rda")["x"]
    torch.testing.assert_close(halved, torch.tensor([[1.5, 2.0]]))
    assert not merge(_one([0.0, 0.0], [0.0, 0.0]), [0.5, 0.5], shapes, "rda")["x"].any()
    assert not merge(_one([0.3, 0.7], [-0.9, -2.1]), [0.5, 0.5], shapes, "rda")["x"].any()
    tiny = merge(_one([3e-39, 4e-39]), [1.0], shapes, "rda")["x"]
    torch.testing.assert_close(tiny, torch.tensor([[3e-39, 4e-39]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("values", "trim", "expected"),
    [
        ([1.0, 100.0, 3.0, 2.0, 4.0], 0.2, 3.0),  # without 1 and 100
        ([7.0, -5.0, 1.0], 0.2, 1.0),  # one at either end, although 0.2 * 3 < 1
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, -90.0], 0.4, 4.5),  # the two in the middle: 5 and 4
        ([9.0, 8.0, 77.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, -90.0], 0.2, 4.666667),  # 8, 6, 5, 4, 3, 2
        ([1.0, 1.0, 1.0, 5.0], 0.2, 1.0),
    ],
)
def test_trimmed_leaves_the_extremes_out(values: list[float], trim: float, expected: float) -> None:
    """By coordinate, whatever the weights; their sum scales the result."""
    deltas = [_whole({"x": torch.tensor([[value, -value]])}) for value in values]
    weights = [0.05 * (1 + number % 2) for number in range(len(values))]
    merged = merge(deltas, weights, {"x": (1, 2)}, "trimmed", trim=trim)["x"] / sum(weights)
    torch.testing.assert_close(merged, torch.tensor([[expected, -expected]]))


def test_trimmed_of_two_is_their_mean() -> None:
    """There is nothing to leave out."""
    assert merge(_one([8.0], [4.0]), [0.75, 0.25], {"x": (1, 1)}, "trimmed")["x"].item() == 7.0


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_contribution_is_refused_by_name(bad: float, kind: MergeKind) -> None:
    """A NaN or an Inf in any contribution names contribution and tensor, even where it would be trimmed."""
    poisoned = _random(2)
    poisoned["b"][3] = bad
    contributions = [_whole(tensors) for tensors in (_random(1), poisoned, _random(3))]
    with pytest.raises(NonFiniteTensor, match="contribution 1: b"):
        merge(contributions, [0.3, 0.3, 0.3], SMALL, kind)


def test_a_poisoned_scale_is_refused_by_name() -> None:
    """A block whose scale is NaN on the wire."""
    good = _whole(_random(2), "int4")
    good.parts[0]["w"][1][4, :2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
    with pytest.raises(NonFiniteTensor, match="contribution 1: w"):
        merge([_whole(_random(1), "int4"), good], [0.5, 0.5], SMALL)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [0.5, math.nan], [1], [0.7, 0.7], [math.inf, 0.5]])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    """All zero, negative, NaN, more than one together, or too few weights raise."""
    with pytest.raises(MergeError, match="weight"):
        merge([_whole(_random(1)), _whole(_random(2))], weights, SMALL)


def test_contributions_of_different_models_are_refused() -> None:
    """Missing, unknown, misshapen and wrongly typed tensors are named, with the contribution."""
    good = _whole(_random(1))

    def refused(part: dict[str, tuple[int, Tensor]], message: str, codec: Codec = "fp32") -> None:
        with pytest.raises(MergeError, match=message):
            merge([good, Encoded(codec, [part])], [0.5, 0.5], SMALL)

    part = dict(good.parts[0])
    refused({"w": part["w"], "s": part["s"]}, r"contribution 1: b: rows missing")
    refused(part | {"z": (0, torch.ones(1))}, r"contribution 1: z: a part holds a tensor")
    refused(part | {"w": (0, torch.ones(5, 6))}, r"contribution 1: w: rows of another .*\[5, 6\]")
    refused(part | {"b": (0, part["b"][1].bfloat16())}, r"contribution 1: b: .*bfloat16")
    refused(part | {"w": (0, torch.zeros(6, 9, dtype=torch.uint8))}, "contribution 1: w: rows of", "int4")
    refused(part | {"s": (0, torch.ones(1))}, "contribution 1: s: a scalar must")


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
    assert digest(assemble(parts, SMALL)) == digest(whole)


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
