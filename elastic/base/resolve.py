"""From what was given to what will be used: every derived value, with where it came from and why.

`resolve_job` and `resolve_fleet` fill the fields that may be left out and record an `Origin` for each
value, so that nothing is chosen silently: `elastic config show` prints them, a run keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from elastic.base.config import DecoderModel, Fleet, Job
from elastic.base.presets import derived_outer
from elastic.base.schema import Path
from elastic.base.section import Section

Source = Literal["file", "override", "argument", "default", "derived"]
T = TypeVar("T", Job, Fleet)


@dataclass(frozen=True)
class Origin:
    """A value and where it came from.

    source is `file` or `override` (position says which), `argument` (built in Python), `default`, or
    `derived` (why says from what). A derived None is a choice left to the run; `why` says what it takes.
    """

    value: object
    source: Source
    why: str = ""
    position: str = ""


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A job or fleet with every value filled in, and the origin of each by dotted key."""

    value: T
    origins: dict[str, Origin] = field(repr=False)

    def where(self, key: str) -> str:
        """The place to name in a message about this key: its position, or the key itself."""
        origin = self.origins.get(key)
        return origin.position if origin and origin.position else key


NODE_CACHE = "~/.cache/elastic"
"""Where every node keeps token shards of its own when the run folder is in a bucket."""

MAX_MICRO_BATCH = 32
"""Sequences a worker holds at once, unless told otherwise."""

Given = Callable[[Path], tuple[Source, str] | None]
"""Tells the source and position of a value that the user gave; None for one that was left out."""


def resolve_job(job: Job, given: Given | None = None) -> Resolved[Job]:
    """The job with all derived values filled in.

    `given` tells where a value was written; without it, what was set when the Job was built counts as given.
    """
    run_folder = job.run_folder or f"runs/{job.name}"
    derive: dict[Path, tuple[object, str]] = {
        ("run_folder",): (run_folder, "runs/<name>"),
        ("data", "cache_folder"): (
            (NODE_CACHE, "the run folder is remote, and token shards are memory-mapped on every node")
            if "://" in run_folder
            else (f"{run_folder.rstrip('/')}/data", "<run_folder>/data")
        ),
        ("inner", "micro_batch_sequences"): (
            min(job.inner.batch_sequences, MAX_MICRO_BATCH),
            f"batch_sequences {job.inner.batch_sequences}, at most {MAX_MICRO_BATCH}",
        ),
    }
    derive |= {("outer", name): value for name, value in derived_outer(job).items()}
    if isinstance(job.model, DecoderModel):
        model = job.model
        derive[("model", "num_kv_heads")] = (model.num_heads, f"num_heads {model.num_heads}")
        derive[("model", "ffn_dim")] = (
            -(-model.d_model * 8 // 3 // 16) * 16,
            f"8/3 of d_model {model.d_model}, rounded up to a multiple of 16",
        )
    return _resolve(job, derive, given or _set_in_python(job))


def resolve_fleet(fleet: Fleet, given: Given | None = None) -> Resolved[Fleet]:
    """The fleet with all derived values; `given` as in `resolve_job`."""
    derive: dict[Path, tuple[object, str]] = {
        ("control_region",): (None, "the driver's own node"),
        ("min_islands",): (len(fleet.islands), f"all {len(fleet.islands)} islands"),
    }
    for i, island in enumerate(fleet.islands):
        threads = max(1, int(island.cpus_per_worker))
        why = f"cpus_per_worker {island.cpus_per_worker:g}, at least 1"
        derive[("islands", i, "threads_per_worker")] = (threads, why)
    return _resolve(fleet, derive, given or _set_in_python(fleet))


def leaves(model: BaseModel, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value of a job or fleet with its path; lists of sections are entered, other lists are not."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        yield from _leaves_of(value, (*path, name))


def dotted(path: Path) -> str:
    """A path as it is written in overrides: `islands.0.workers.max`."""
    return ".".join(str(key) for key in path)


def _leaves_of(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(value, BaseModel):
        yield from leaves(value, path)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for i, each in enumerate(value):
            yield from leaves(each, (*path, i))
    else:
        yield path, value


def _resolve(model: T, derive: dict[Path, tuple[object, str]], given: Given) -> Resolved[T]:
    origins: dict[str, Origin] = {}
    filled: dict[Path, object] = {}
    for path, value in leaves(model):
        source = given(path)
        if value is None and path in derive:
            filled[path], why = derive[path]
            origins[dotted(path)] = Origin(filled[path], "derived", why)
        elif source is not None:
            origins[dotted(path)] = Origin(value, source[0], position=source[1])
        else:
            origins[dotted(path)] = Origin(value, "default")
    return Resolved(_with(model, filled), origins)


def _with(model: Any, filled: dict[Path, object]) -> Any:
    """A copy of a frozen model with the values at these paths; what was set stays marked as set."""
    update: dict[str, object] = {}
    for name in type(model).model_fields:
        below = {path[1:]: value for path, value in filled.items() if path[0] == name}
        if () in below:
            update[name] = below[()]
        elif below and isinstance(getattr(model, name), Section):
            update[name] = _with(getattr(model, name), below)
        elif below:
            update[name] = [
                _with(each, {path[1:]: value for path, value in below.items() if path[0] == i})
                for i, each in enumerate(getattr(model, name))
            ]
    return model.model_copy(update=update)


def _set_in_python(model: BaseModel) -> Given:
    def given(path: Path) -> tuple[Source, str] | None:
        here: Any = model
        for key in path:
            if isinstance(here, BaseModel):
                if key not in here.model_fields_set:
                    return None
                here = getattr(here, key)
            else:
                here = here[key]
        return "argument", ""

    return given
