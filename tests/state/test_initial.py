"""Where the first parameters of a run come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from elastic.base.config import Budget, DecoderModel, Job
from elastic.base.errors import ConfigError
from elastic.state.initial import initial_parameters
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.run_file import write_run
from elastic.state.storage import Storage
from elastic.training.hf_layout import to_hugging_face

pytestmark = pytest.mark.unit
VOCABULARY = 40


def job(init_from: str | None = None, d_model: int = 16) -> Job:
    model = DecoderModel(d_model=d_model, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32)
    return Job(name="demo", model=model, budget=Budget(tokens=1), init_from=init_from)


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def no_fall_back(name: str, reason: str, instead: str) -> None:
    raise AssertionError(f"{name}: {reason}; {instead}")


def test_the_seed_decides() -> None:
    """The same seed gives the same bits, another seed others."""
    first = initial_parameters(job(), VOCABULARY)
    assert same(first, initial_parameters(job(), VOCABULARY))
    assert not same(first, initial_parameters(job().model_copy(update={"seed": 1}), VOCABULARY))


def run_folder(path: Path) -> dict[str, torch.Tensor]:
    """A run folder at version 0 with parameters that no seed gives; returns them."""
    storage = Storage(path)
    parameters = {name: value + 1.0 for name, value in initial_parameters(job(), VOCABULARY).items()}
    write_run(storage, {"run": "demo"})
    dealing = {"total_sequences": 1, "block_sequences": 1}
    lineage = load_records(storage)
    OuterStore.open(storage, job(), "demo", 1, lineage, lambda: [parameters], dealing, no_fall_back)
    return parameters


def test_another_run_gives_its_newest_parameters(tmp_path: Path) -> None:
    """`init_from` a run folder takes over the newest durable theta."""
    parameters = run_folder(tmp_path / "old")
    assert same(initial_parameters(job(str(tmp_path / "old")), VOCABULARY), parameters)


def test_a_hugging_face_folder_gives_its_weights(tmp_path: Path) -> None:
    """`init_from` a folder in Llama's layout takes over its weights under our names."""
    parameters = {name: value + 1.0 for name, value in initial_parameters(job(), VOCABULARY).items()}
    config, tensors = to_hugging_face(parameters, job().model, VOCABULARY, 8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    assert same(initial_parameters(job(str(tmp_path)), VOCABULARY), parameters)


def test_other_shapes_and_empty_folders_are_refused(tmp_path: Path) -> None:
    """Weights of another model, and a folder that holds none, are named with what to do."""
    run_folder(tmp_path / "old")
    with pytest.raises(
        ConfigError, match=r"embedding.weight has shape \[40, 16\], the job's model \[40, 32\]"
    ):
        initial_parameters(job(str(tmp_path / "old"), d_model=32), VOCABULARY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a run folder"):
        initial_parameters(job(str(tmp_path / "empty")), VOCABULARY)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not those of the configured decoder"):
        initial_parameters(job(str(tmp_path / "empty")), VOCABULARY)
