"""What can be wrong with a configuration whose every value is well-formed: things that do not fit together,
files and packages that are not there. Looks at the disk, never at the network and never at the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from elastic.base.config import (
    Data,
    Fleet,
    HuggingFaceModel,
    Job,
    Logging,
    Outer,
    PythonModel,
    TiktokenTokenizer,
    TokenizersTokenizer,
)
from elastic.base.errors import ConfigError
from elastic.base.presets import PRESETS
from elastic.base.resolve import Resolved
from elastic.base.schema import Path

Mistake = tuple[Path, str]

STORAGE_EXTRAS = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}
"""The package that opens URLs of a scheme, and the extra that brings it."""


def check_section(name: str, value: Any) -> Iterator[Mistake]:
    """The mistakes of one top-level field of a job or fleet; paths begin with the field's name."""
    check = _CHECKS.get(name)
    if check is not None and value is not None:
        for path, why in check(value):
            yield (name, *path), why


def check_together(job: Resolved[Job], fleet: Resolved[Fleet]) -> None:
    """Raises ConfigError with all mistakes that only a job and a fleet together can have."""
    problems: list[str] = []
    islands = fleet.value.islands
    if job.value.budget.max_cost is not None:
        unpriced = [island.name for island in islands if island.price_per_worker_hour is None]
        if unpriced:
            problems.append(
                f"{job.where('budget.max_cost')}: budget.max_cost needs price_per_worker_hour on every "
                f"island; fleet {fleet.value.name} has none for {', '.join(unpriced)}"
            )
    batch = job.value.inner.batch_sequences
    for i, island in enumerate(islands):
        if island.workers.max > batch:
            problems.append(
                f"{fleet.where(f'islands.{i}.workers.max')}: island {island.name} may have "
                f"{island.workers.max} workers, but inner.batch_sequences is {batch}; "
                "each worker needs at least one sequence of the batch"
            )
    if problems:
        raise ConfigError(problems)


def _model(model: object) -> Iterator[Mistake]:
    if isinstance(model, HuggingFaceModel):
        yield from _extra(("kind",), "transformers", "hf")
        yield from _there(("path",), model.path)
    elif isinstance(model, PythonModel):
        top = model.entry.split(":")[0].split(".")[0]
        beside = os.path.isdir(top) or os.path.isfile(f"{top}.py")
        if not beside and importlib.util.find_spec(top) is None:
            yield ("entry",), f"no Python module '{top}', neither installed nor in {os.getcwd()}"


def _data(data: Data) -> Iterator[Mistake]:
    for name, sources in (("sources", data.sources), ("validation_sources", data.validation_sources or [])):
        for i, source in enumerate(sources):
            if source.startswith("builtin:"):
                if source != "builtin:stdlib":
                    yield (name, i), f"unknown corpus '{source}'; there is builtin:stdlib"
            elif "://" in source:
                yield from _storage((name, i), source)
            elif not set("*?[") & set(source):
                yield from _there((name, i), source)
    if data.cache_folder is not None and "://" in data.cache_folder:
        yield ("cache_folder",), "must be a path, not a URL: token shards are memory-mapped"
    tokenizer = data.tokenizer
    if isinstance(tokenizer, TokenizersTokenizer):
        yield from _extra(("tokenizer", "kind"), "tokenizers", "hf")
        yield from _there(("tokenizer", "file"), tokenizer.file)
    elif isinstance(tokenizer, TiktokenTokenizer):
        yield from _extra(("tokenizer", "kind"), "tiktoken", "tiktoken")
        yield from _there(("tokenizer", "file"), tokenizer.file)


def _outer(outer: Outer) -> Iterator[Mistake]:
    preset = PRESETS[outer.preset]
    for name in preset.unused:
        if name in outer.model_fields_set and getattr(outer, name) is not None:
            yield (name,), f"has no effect under preset {outer.preset}; remove it"
    sync_every = outer.sync_every or preset.sync_every
    if outer.fragments is not None and outer.fragments > sync_every:
        why = (
            f"{outer.fragments} fragments do not fit into sync_every {sync_every}: at most one a step is due"
        )
        yield ("fragments",), why
    if outer.overlap_steps is not None and outer.overlap_steps > sync_every:
        yield ("overlap_steps",), f"{outer.overlap_steps} is more than sync_every {sync_every}"
    alpha = preset.alpha if outer.alpha is None else outer.alpha
    if alpha and (outer.mix or preset.mix) == "keep-progress" and outer.alpha is not None:
        yield ("alpha",), "has no effect with mix keep-progress; remove it"


def _logging(logging: Logging) -> Iterator[Mistake]:
    if logging.wandb_project is not None:
        yield from _extra(("wandb_project",), "wandb", "wandb")


def _init_from(source: str) -> Iterator[Mistake]:
    yield from _storage((), source) if "://" in source else _there((), source)


def _run_folder(folder: str) -> Iterator[Mistake]:
    yield from _storage((), folder)


_CHECKS: dict[str, Callable[[Any], Iterator[Mistake]]] = {
    "model": _model,
    "data": _data,
    "outer": _outer,
    "logging": _logging,
    "init_from": _init_from,
    "run_folder": _run_folder,
}


def _there(path: Path, name: str) -> Iterator[Mistake]:
    if not os.path.exists(name):
        relative = "" if os.path.isabs(name) else f"; relative paths start from {os.getcwd()}"
        yield path, f"no such file or folder: '{name}'{relative}"


def _extra(path: Path, package: str, extra: str) -> Iterator[Mistake]:
    if importlib.util.find_spec(package) is None:
        yield path, f"needs the package {package}: pip install 'elastic-islands[{extra}]'"


def _storage(path: Path, url: str) -> Iterator[Mistake]:
    package, extra = STORAGE_EXTRAS.get(url.split("://")[0] if "://" in url else "", ("", ""))
    if package:
        yield from _extra(path, package, extra)
