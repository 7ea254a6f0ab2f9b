"""Tensors on the wire: what is packed comes back, rows apart or together, and nothing bad gets through."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from elastic.exchange.wire import (
    MalformedArray,
    Wire,
    pack,
    pack_encoded,
    to_array,
    to_encoded,
    unpack,
    unpack_rows,
)
from elastic.training.codec import Codec, NonFiniteTensor, decode, encode

pytestmark = pytest.mark.unit

CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "int4", "e3m0")
every_codec = pytest.mark.parametrize("codec", CODECS)
SHAPES = {
    "matrix": (7, 5),
    "vector": (6,),
    "scalar": (),
    "cube": (3, 2, 4),
    "empty": (0, 5),
    "wide": (4, 300),
}
WHOLE = {name: (shape[0] + 2, *shape[1:]) if shape else () for name, shape in SHAPES.items()}
"""Shapes of the tensors whose rows from the third on are those of SHAPES."""


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 1e3 for name, shape in SHAPES.items()}


@every_codec
def test_what_is_packed_comes_back(codec: Codec) -> None:
    """fp32 is exact, bf16 the nearest bf16, blocks as the codec makes them; vectors and scalars exact."""
    tensors = _tensors()
    wire = pack({name: (2, rows) for name, rows in tensors.items()}, codec)
    back = unpack(pickle.loads(pickle.dumps(wire)), WHOLE)
    assert {name: start for name, (start, _) in back.items()} == dict.fromkeys(tensors, 2)
    for name, rows in tensors.items():
        expected = rows
        if codec == "bf16" and rows.ndim >= 2:
            expected = rows.bfloat16().float()
        elif codec != "fp32" and rows.ndim >= 2:
            expected = decode(codec, encode(codec, rows), rows.shape)
        assert torch.equal(back[name][1], expected), name
        assert back[name][1].dtype == torch.float32


@pytest.mark.parametrize(
    ("codec", "matrices"),
    [
        ("fp32", 4 * (35 + 24 + 1200)),
        ("bf16", 2 * (35 + 24 + 1200)),
        ("int8", 7 * (2 + 5) + 3 * (2 + 8) + 4 * (6 + 300)),
        ("int4", 7 * (2 + 3) + 3 * (2 + 4) + 4 * (6 + 150)),
        ("e3m0", 7 * (2 + 3) + 3 * (2 + 4) + 4 * (6 + 150)),
    ],
)
def test_sizes_are_the_payload(codec: Codec, matrices: int) -> None:
    """Derived by hand: bytes of values, two bytes for each block's scale, four bytes a value of vectors."""
    rows = {name: (0, tensor) for name, tensor in _tensors().items()}
    assert pack(rows, codec).nbytes == matrices + 4 * (6 + 1)


@every_codec
def test_a_rank_takes_its_rows_without_the_rest(codec: Codec) -> None:
    """Any rows of a whole tensor are what unpacking all of it would give; a scalar is always whole."""
    tensors = _tensors()
    wire = pack({name: (0, rows) for name, rows in tensors.items()}, codec)
    whole = unpack(wire, SHAPES)
    for name in ("matrix", "vector", "cube", "wide"):
        for start, stop in ((0, 2), (2, 3), (1, 1)):
            rows = unpack_rows(wire, name, SHAPES[name], start, stop)
            assert torch.equal(rows, whole[name][1][start:stop])
    assert torch.equal(unpack_rows(wire, "scalar", (), 0, 1), tensors["scalar"])


@every_codec
def test_the_sender_may_go_on_at_once(codec: Codec) -> None:
    """What was packed does not change when the tensor it came from does, and the reader gets copies."""
    for shape in ((3, 4), (4,)):
        tensor = torch.ones(shape)
        wire = pack({"w": (0, tensor)}, codec)
        before = unpack(wire, {"w": shape})["w"][1].clone()
        tensor.zero_()
        (_, first) = unpack(wire, {"w": shape})["w"]
        assert torch.equal(first, before)
        first.zero_()
        assert torch.equal(unpack(wire, {"w": shape})["w"][1], before)


@every_codec
def test_read_only_arrays_can_be_unpacked(codec: Codec) -> None:
    """Arrays from an object store are read-only; what is made of them can be written."""
    wire = pack({"w": (0, torch.zeros(2, 2))}, codec)
    array = wire.arrays["w"][1]
    array.flags.writeable = False
    rows = unpack(Wire(codec, {"w": (0, array)}), {"w": (2, 2)})["w"][1]
    rows.add_(1)
    assert torch.equal(rows, torch.ones(2, 2))


def test_rows_of_a_view_are_packed_as_they_are() -> None:
    """A slice and a transposed view travel as the values they show."""
    base = torch.arange(24.0).reshape(4, 6)
    wire = pack({"rows": (1, base[1:3]), "turned": (0, base.T)}, "fp32")
    back = unpack(wire, {"rows": (4, 6), "turned": (6, 4)})
    assert torch.equal(back["rows"][1], base[1:3])
    assert torch.equal(back["turned"][1], base.T)


@every_codec
def test_what_is_encoded_already_shares_its_memory(codec: Codec) -> None:
    """A published version is packed without a copy, and can be looked at in encoded form without one."""
    encoded = encode(codec, torch.ones(4, 4) * 1.5)
    wire = pack_encoded({"w": encoded}, codec)
    array = wire.arrays["w"][1]
    assert array.__array_interface__["data"][0] == encoded.data_ptr()
    again = to_encoded(array)
    assert again.data_ptr() == encoded.data_ptr()
    assert again.dtype == encoded.dtype
    assert torch.equal(again, encoded)
    start, rows = unpack(wire, {"w": (4, 4)})["w"]
    assert start == 0
    assert torch.equal(rows, decode(codec, encoded, (4, 4)))


@every_codec
def test_an_array_gives_back_the_encoded_tensor(codec: Codec) -> None:
    """`to_encoded` undoes `to_array` for every form, read-only ones included."""
    for rows in _tensors().values():
        encoded = encode(codec, rows)
        array = to_array(encoded, copy=True)
        array.flags.writeable = False
        assert torch.equal(to_encoded(array), encoded)
        assert to_encoded(array).dtype == encoded.dtype


@every_codec
def test_values_that_are_not_finite_do_not_travel(codec: Codec) -> None:
    """NaN, Inf, and what overflows in the codec are refused with the tensor's name."""
    for value in (float("nan"), float("inf"), 3.4e38):
        if codec == "fp32" and value == 3.4e38:
            continue
        tensor = torch.ones(2, 2)
        tensor[1, 1] = value
        with pytest.raises(NonFiniteTensor, match=r"blocks\.0\.w"):
            pack({"blocks.0.w": (0, tensor)}, codec)


@pytest.mark.parametrize(
    ("codec", "array", "shape", "expected"),
    [
        ("int4", np.zeros((3, 7), np.uint8), (3, 8), r"uint8 \[up to 3, 6\] for int4 of shape \(3, 8\)"),
        ("int8", np.zeros((3, 10), np.int8), (3, 8), r"uint8 \[up to 3, 10\]"),
        ("int8", np.zeros(30, np.uint8), (3, 8), r"uint8 \[up to 3, 10\]"),
        ("e3m0", np.zeros((3, 8), np.float32), (3, 8), r"uint8 \[up to 3, 6\]"),
        ("bf16", np.zeros((3, 8), np.float32), (3, 8), r"uint16 \[up to 3, 8\]"),
        ("bf16", np.zeros((3, 9), np.uint16), (3, 8), r"uint16 \[up to 3, 8\]"),
        ("fp32", np.zeros((3, 8), np.float64), (3, 8), r"float32 \[up to 3, 8\]"),
        ("fp32", np.zeros((4, 8), np.float32), (3, 8), r"float32 \[up to 3, 8\]"),
        ("int4", np.zeros(5, np.uint16), (5,), r"float32 \[up to 5\]"),
        ("int4", np.zeros((5, 1), np.float32), (5,), r"float32 \[up to 5\]"),
        ("fp32", np.zeros(1, np.float32), (), r"float32 \[\]"),
    ],
)
def test_malformed_arrays_are_refused_by_name(
    codec: Codec, array: np.ndarray, shape: tuple[int, ...], expected: str
) -> None:
    """Wrong type, columns, row bytes, dimensions or too many rows: tensor, seen and expected are named."""
    seen = rf"saw: {array.dtype} \[{', '.join(map(str, array.shape))}\]"
    with pytest.raises(MalformedArray, match=rf"head\.weight: the array is not {expected}.*{seen}"):
        unpack(Wire(codec, {"head.weight": (0, array)}), {"head.weight": shape})


@every_codec
def test_rows_are_taken_only_of_a_whole_tensor(codec: Codec) -> None:
    """An array of fewer rows than its tensor cannot say which ones they are; a broken one is refused, too."""
    wire = pack({"w": (0, torch.ones(3, 8))}, codec)
    with pytest.raises(MalformedArray, match=r"w: the array is not 4 rows of a tensor of shape \(4, 8\)"):
        unpack_rows(wire, "w", (4, 8), 0, 2)
    with pytest.raises(MalformedArray, match="w: the array is not"):
        unpack_rows(wire, "w", (3, 400), 0, 2)
