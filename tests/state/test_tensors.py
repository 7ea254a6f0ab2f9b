"""Tensor files: what is stored comes back bit for bit, or is refused by name."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch

from elastic.base.errors import IntegrityError
from elastic.state import tensors
from elastic.state.storage import Storage
from elastic.state.tensors import Stored

pytestmark = pytest.mark.unit


@pytest.fixture(params=["path", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A run folder on a disk and in a bucket."""
    return Storage(str(tmp_path / "run") if request.param == "path" else f"memory://{tmp_path}/run")


def some() -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, among them what safetensors does not take as it is."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 4, generator=generator)
    return {
        "matrix": whole,
        "same": whole,
        "rows": whole[2:4],
        "turned": whole.T,
        "bf16": whole.to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "count": torch.arange(5),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def test_tensors_come_back_bit_for_bit(storage: Storage) -> None:
    """Types, shapes and bits survive, shared memory and views included, and the caller's stay untouched."""
    saved = some()
    stored = tensors.save(storage, "outer/x.safetensors", saved, {"format": "pt"})
    loaded = tensors.load(storage, Stored.from_json({**stored.to_json(), "what": "snapshot"}))
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert (
            loaded[name].numpy(force=True).tobytes() == tensor.contiguous().numpy(force=True).tobytes()
            if (tensor.dtype != torch.bfloat16)
            else torch.equal(loaded[name], tensor)
        )


def test_a_tensor_file_can_be_read_by_whoever_reads_the_folder(tmp_path: Path) -> None:
    """Its mode is that of any other file of the run: a shared run folder stays shared."""
    storage = Storage(tmp_path / "run")
    tensors.save(storage, "x.safetensors", some())
    storage.write("plain", b"")
    modes = {name: (tmp_path / "run" / name).stat().st_mode for name in ("x.safetensors", "plain")}
    assert modes["x.safetensors"] == modes["plain"]


@pytest.mark.parametrize("position", [0, 9, 200, -1])
def test_a_flipped_bit_is_found(storage: Storage, position: int) -> None:
    """Wherever a stored byte changes, loading names the file and both hashes."""
    stored = tensors.save(storage, "x.safetensors", some())
    data = bytearray(storage.read(stored.name))
    data[position] ^= 1
    storage.write(stored.name, bytes(data))
    for use in (tensors.load, tensors.verify):
        with pytest.raises(IntegrityError) as failure:
            use(storage, stored)
        assert "x.safetensors" in str(failure.value)
        assert stored.sha256[:16] in str(failure.value)


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_a_cut_file_is_found(storage: Storage, keep: int) -> None:
    """A file cut short is refused with its length."""
    stored = tensors.save(storage, "x.safetensors", some())
    storage.write(stored.name, storage.read(stored.name)[:keep])
    with pytest.raises(IntegrityError, match=rf"{keep} bytes.*expected {stored.bytes} bytes"):
        tensors.load(storage, stored)


def test_a_missing_file_is_found(storage: Storage) -> None:
    """A file that is gone is refused by name, not with a bare FileNotFoundError."""
    stored = Stored("gone.safetensors", "0" * 64, 1)
    for use in (tensors.load, tensors.verify):
        with pytest.raises(IntegrityError, match=r"gone\.safetensors: the file is missing"):
            use(storage, stored)


def test_a_planted_pickle_does_not_run(storage: Storage, tmp_path: Path) -> None:
    """A pickle under a tensor file's name, even with the right hash, is refused and never executed."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    hashed = storage.publish("x.safetensors", lambda path: path.write_bytes(pickle.dumps(Trap())))
    with pytest.raises(IntegrityError, match="not the safetensors file"):
        tensors.load(storage, Stored("x.safetensors", hashed.sha256, hashed.bytes))
    assert not (tmp_path / "trapped").exists()


def test_the_product_never_unpickles() -> None:
    """No module of elastic.state loads a pickle, nor calls torch.load or torch's checkpoint reader."""
    import elastic.state

    for path in Path(elastic.state.__path__[0]).glob("*.py"):
        text = path.read_text()
        for word in ("pickle.load", "torch.load(", "torch.distributed.checkpoint", "import pickle"):
            assert word not in text, f"{path.name}: {word}"
