"""A run's parameters as a Hugging Face folder: config.json, model.safetensors, tokenizer files.

Exported is `theta` of the newest durable version: the outer parameters whose validation loss the run
reports. (`published`, what islands hold, differs from it by the rounding of a low-precision down-link.)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from elastic.base.config import DecoderModel, HuggingFaceModel, Job
from elastic.base.errors import ConfigError, DataError, IntegrityError, RunFolderError
from elastic.state.hf_tokenizer import write_tokenizer
from elastic.state.records import load_records
from elastic.state.replay import load_outer
from elastic.state.run_file import require_run
from elastic.state.storage import Storage
from elastic.state.tensors import separate
from elastic.training.hf_layout import to_hugging_face
from elastic.training.model import build_model

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    directory: str
    run: str
    version: int
    parameters: str
    """Which parameters: always `theta`, the outer parameters."""
    num_parameters: int
    loads_in_transformers: bool
    files: list[str]
    notes: list[str] = field(default_factory=list)
    """What a person should know, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def export_run(storage: Storage, directory: str | os.PathLike[str]) -> Exported:
    """Write the newest durable outer parameters to a new local folder, whole or not at all.

    Raises ConfigError if the folder exists and is not empty, RunFolderError if this is no run or one
    without a version, IntegrityError if no stored state can be used.
    """
    target = Path(directory).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError([f"{target}: exists and is not empty; give a new folder"])
    run = require_run(storage)
    job = Job.model_validate(run["job"])
    lineage = load_records(storage)
    if not lineage.records:
        raise RunFolderError("the run has no version yet", where=storage.url, fix="train first")
    notes: list[str] = []
    loaded = load_outer(
        storage, lineage, lambda name, reason, instead: notes.append(f"{name} was not used ({reason})")
    )
    about = {
        "format": "pt",
        "run": str(run.get("run", "")),
        "version": str(loaded.version),
        "parameters": "theta",
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        end = _write_tokenizer(job, work, notes)
        known = _write_model(job, loaded.theta, work, about, end, notes)
        files = _open_to_readers(work)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    count = sum(tensor.numel() for tensor in loaded.theta.values())
    return Exported(
        str(target), about["run"], loaded.version, about["parameters"], count, known, files, notes
    )


def _write_tokenizer(job: Job, folder: Path, notes: list[str]) -> int | None:
    try:
        return write_tokenizer(job.data.tokenizer, folder, job.data.seq_len)
    except DataError as error:
        notes.append(f"no tokenizer files: {error.what}, {error.saw}")
        return None


def _write_model(
    job: Job,
    theta: Mapping[str, torch.Tensor],
    folder: Path,
    about: Mapping[str, str],
    end: int | None,
    notes: list[str],
) -> bool:
    """Write weights and configuration; returns whether `transformers` can load them."""
    if isinstance(job.model, DecoderModel):
        vocab_size = theta["embedding.weight"].shape[0]
        config, state = to_hugging_face(theta, job.model, vocab_size, job.data.seq_len)
        ends = {"bos_token_id": end, "eos_token_id": end}
        _write_json(folder / "config.json", config | ends)
        _write_json(folder / "generation_config.json", ends)
        save_file(separate(state), folder / WEIGHTS_FILE, dict(about))
        return True
    if isinstance(job.model, HuggingFaceModel):
        model = build_model(job.model, 1, job.data.seq_len, job.seed)
        _fill(model, theta)
        inner: Any = model.hf
        inner.save_pretrained(folder)
        if job.init_from is not None and any(not p.requires_grad for p in model.parameters()):
            notes.append("frozen parameters are those of model.path, not of init_from")
        return True
    save_file(separate(theta), folder / WEIGHTS_FILE, dict(about))
    notes.append(
        f"the model is your own ({job.model.entry}): {WEIGHTS_FILE} has its trained parameters under their "
        "own names, and there is no config.json"
    )
    return False


@torch.no_grad()
def _fill(model: torch.nn.Module, theta: Mapping[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    unknown = sorted(theta.keys() - parameters.keys())
    if unknown:
        raise IntegrityError(
            "the stored parameters are of another model", where=unknown[0], saw=f"{len(unknown)} unknown"
        )
    for name, tensor in theta.items():
        parameters[name].copy_(tensor)


def _open_to_readers(folder: Path) -> list[str]:
    """Give all files the usual mode (safetensors lets only the owner read); returns their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    probe = folder / ".mode"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in paths:
        path.chmod(mode)
    return [str(path.relative_to(folder)) for path in paths]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
