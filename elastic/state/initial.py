"""Where the first parameters of a run come from: a seed, another run, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from elastic.base.config import DecoderModel, HuggingFaceModel, Job
from elastic.base.errors import ConfigError, ElasticError
from elastic.state.records import load_records
from elastic.state.replay import load_outer
from elastic.state.run_file import require_run
from elastic.state.storage import Storage
from elastic.training.fragments import fragments_of
from elastic.training.model import build_model
from elastic.training.shard import parameters_of

Tensors = dict[str, torch.Tensor]


def initial_fragments(job: Job, vocab_size: int) -> list[Tensors]:
    """The parameters of version 0 by fragment, for a resolved job; else as `initial_parameters`."""
    built = build_model(job.model, vocab_size, job.data.seq_len, job.seed)
    parameters = _initial(job, built)
    return [{name: parameters[name] for name in names} for names in fragments_of(built, job.outer)]


def initial_parameters(job: Job, vocab_size: int) -> Tensors:
    """The trainable parameters of version 0, whole, fp32, on the CPU."""
    return _initial(job, build_model(job.model, vocab_size, job.data.seq_len, job.seed))


def _initial(job: Job, built: nn.Module) -> Tensors:
    parameters = {name: p.detach().to(torch.float32).clone() for name, p in parameters_of(built).items()}
    if job.init_from is None:
        return parameters
    given = _parameters_from(job, job.init_from)
    problems = [
        f"init_from {job.init_from}: {name} has shape {list(given[name].shape)}, "
        f"the job's model {list(value.shape)}"
        for name, value in parameters.items()
        if name in given and given[name].shape != value.shape
    ]
    missing = sorted(parameters.keys() - given.keys())
    unknown = sorted(given.keys() - parameters.keys())
    if missing or unknown:
        problems.append(
            f"init_from {job.init_from}: the parameters differ from the job's model: "
            f"missing {missing[:3]}, unknown {unknown[:3]}"
        )
    if problems:
        raise ConfigError([*problems, "  fix: give the job the model section of the weights' own run"])
    return {name: given[name].to(torch.float32).clone() for name in parameters}


def is_run_folder(url: str) -> bool:
    """Whether this is the folder of a run of ours."""
    return Storage(url).exists("run.json")


def _parameters_from(job: Job, url: str) -> Tensors:
    if is_run_folder(url):
        storage = Storage(url)
        require_run(storage)
        return load_outer(storage, load_records(storage)).theta
    folder = Path(url)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            [
                f"init_from: {url} is neither a run folder (no run.json) "
                "nor a Hugging Face folder (no config.json)",
                "  fix: give the folder of another run, "
                "or of a model that `save_pretrained` or `elastic export` wrote",
            ]
        )
    if isinstance(job.model, DecoderModel):
        return _decoder_parameters(job.model, folder)
    source = HuggingFaceModel(kind="hf", path=url, weights=True)
    return dict(parameters_of(build_model(source, 1, job.data.seq_len, job.seed)))


def _decoder_parameters(model: DecoderModel, folder: Path) -> Tensors:
    """Our decoder's names for the weights of a Llama or Qwen3 folder."""
    from safetensors.torch import load_file

    from elastic.training.hf_layout import from_hugging_face

    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    try:
        return from_hugging_face(tensors, model)
    except ElasticError as error:
        raise ConfigError([f"init_from {folder}: {error}"]) from error
