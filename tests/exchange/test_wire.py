"""Tensors on the wire: what is packed comes back, rows apart or together, and nothing bad gets through."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from elastic.exchange.wire import Wire, pack, pack_encoded, unpack, unpack_rows
from elastic.training.codec import Codec, NonFiniteTensor, decode, encode

pytestmark = pytest.mark.unit


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"matrix": (7, 5), "vector": (6,), "scalar": (), "cube": (3, 2, 4), "empty": (0, 5)}
    return {name: torch.randn(shape, generator=generator) * 1e3 for name, shape in shapes.items()}


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_what_is_packed_comes_back(codec: Codec) -> None:
    """fp32 is exact; bf16 is the nearest bf16 of matrices, and exact for tensors of one dimension or none."""
    tensors = _tensors()
    wire = pack({name: (2, rows) for name, rows in tensors.items()}, codec)
    back = unpack(pickle.loads(pickle.dumps(wire)))
    assert {name: start for name, (start, _) in back.items()} == dict.fromkeys(tensors, 2)
    for name, rows in tensors.items():
        expected = rows.bfloat16().float() if codec == "bf16" and rows.ndim >= 2 else rows
        assert torch.equal(back[name][1], expected), name
        assert back[name][1].dtype == torch.float32


def test_sizes_are_the_payload() -> None:
    """Four bytes a value in fp32; two in bf16, but four for vectors and scalars."""
    rows = {name: (0, tensor) for name, tensor in _tensors().items()}
    matrices, small = 7 * 5 + 3 * 2 * 4, 6 + 1
    assert pack(rows, "fp32").nbytes == 4 * (matrices + small)
    assert pack(rows, "bf16").nbytes == 2 * matrices + 4 * small


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_rank_takes_its_rows_without_the_rest(codec: Codec) -> None:
    """Any rows of a whole tensor are what unpacking all of it would give; a scalar is always whole."""
    tensors = _tensors()
    wire = pack({name: (0, rows) for name, rows in tensors.items()}, codec)
    whole = unpack(wire)
    for name in ("matrix", "vector", "cube"):
        for start, stop in ((0, 2), (2, 3), (1, 1)):
            assert torch.equal(unpack_rows(wire, name, start, stop), whole[name][1][start:stop])
    assert torch.equal(unpack_rows(wire, "scalar", 0, 1), tensors["scalar"])


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_the_sender_may_go_on_at_once(codec: Codec) -> None:
    """What was packed does not change when the tensor it came from does, and the reader gets copies."""
    tensor = torch.ones(3, 4)
    wire = pack({"w": (0, tensor)}, codec)
    tensor.zero_()
    (_, first) = unpack(wire)["w"]
    assert torch.equal(first, torch.ones(3, 4))
    first.zero_()
    assert torch.equal(unpack(wire)["w"][1], torch.ones(3, 4))


def test_read_only_arrays_can_be_unpacked() -> None:
    """Arrays from an object store are read-only; what is made of them can be written."""
    wire = pack({"w": (0, torch.ones(2, 2))}, "bf16")
    array = wire.arrays["w"][1]
    array.flags.writeable = False
    rows = unpack(Wire("bf16", {"w": (0, array)}))["w"][1]
    rows.add_(1)
    assert torch.equal(rows, torch.full((2, 2), 2.0))


def test_rows_of_a_view_are_packed_as_they_are() -> None:
    """A slice and a transposed view travel as the values they show."""
    base = torch.arange(24.0).reshape(4, 6)
    wire = pack({"rows": (1, base[1:3]), "turned": (0, base.T)}, "fp32")
    assert torch.equal(unpack(wire)["rows"][1], base[1:3])
    assert torch.equal(unpack(wire)["turned"][1], base.T)


def test_what_is_encoded_already_shares_its_memory() -> None:
    """A published version is packed without a copy."""
    tensor = torch.ones(4, 4)
    wire = pack_encoded({"w": tensor}, "fp32")
    assert np.shares_memory(wire.arrays["w"][1], tensor.numpy())
    half = encode("bf16", tensor * 1.5)
    start, rows = unpack(pack_encoded({"w": half}, "bf16"))["w"]
    assert start == 0
    assert torch.equal(rows, decode(half))


def test_values_that_are_not_finite_do_not_travel() -> None:
    """NaN, Inf, and what overflows in bf16 are refused with the tensor's name."""
    for value in (float("nan"), float("inf"), 3.4e38):
        tensor = torch.ones(2, 2)
        tensor[1, 1] = value
        with pytest.raises(NonFiniteTensor, match=r"blocks\.0\.w"):
            pack({"blocks.0.w": (0, tensor)}, "bf16")
