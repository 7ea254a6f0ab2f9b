"""A scripted scenario through the real code: gradients from a file, islands as threads, no Ray, no data.

For golden tests and for looking into the outer loop with a debugger. The format is that of
tests/golden/README.md. Islands are `OuterPhase` under the usual loop over a real `Synchronizer`; only
the gradient, and with it the model, comes from the file.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.base import config
from elastic.base.errors import ConfigError, DeadlineError
from elastic.base.resolve import resolve_job
from elastic.runtime.board import RunSetup
from elastic.runtime.entering import parameter_fingerprint
from elastic.runtime.island_loop import run_island
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.synchronizer import Synchronizer
from elastic.runtime.versions import library_versions
from elastic.state.outer_store import OuterStore
from elastic.state.records import Lineage
from elastic.state.storage import Storage
from elastic.training.adamw import AdamW
from elastic.training.fragments import fragments_of
from elastic.training.group import Group
from elastic.training.inner import Inner, Loss

TIMEOUT_S = 60.0
KNOWN = frozenset(
    [
        "islands",
        "fragments",
        "sync_every",
        "overlap_steps",
        "alpha",
        "mix",
        "inner",
        "outer",
        "tokens_per_step",
        "outer_steps",
        "codec_up",
        "codec_down",
        "weights",
    ]
)
"""Keys of `config` that can be replayed."""
Values = dict[str, list[float]]


class _Over(Exception):  # not an error: the script has no further gradient
    """The island has taken all its steps."""


@dataclass
class Replayed:
    """What came out: flat values, row-major, as the scenario's `expect` has them."""

    local: list[list[Values]]
    """By island and inner step: values after the step and any adoption."""
    published: list[dict[str, Any]] = field(default_factory=list)
    """Fragment, version and values of every outer step, in order."""

    def to_json(self) -> dict[str, Any]:
        """`local` and `published`."""
        return {"local": self.local, "published": self.published}

    def worst(self, expect: Mapping[str, Any]) -> float:
        """The largest absolute difference from what the scenario expects."""
        worst = 0.0
        pairs = [
            (ours, theirs)
            for mine, others in zip(self.local, expect["local"], strict=True)
            for ours, theirs in zip(mine, others, strict=True)
        ]
        for mine, theirs in zip(self.published, expect["published"], strict=True):
            if (mine["fragment"], mine["version"]) != (theirs["fragment"], theirs["version"]):
                return float("inf")
            pairs.append((mine["params"], theirs["params"]))
        for ours, theirs in pairs:
            for name, values in theirs.items():
                gaps = (abs(a - b) for a, b in zip(ours[name], values, strict=True))
                worst = max(worst, *gaps)
        return worst


def load_scenario(path: Path | str) -> dict[str, Any]:
    """Read a scenario. Raises ConfigError if it is none, or asks for something that cannot be replayed."""
    try:
        scenario = json.loads(Path(path).read_text("utf-8"))
        unknown = sorted(set(scenario["config"]) - KNOWN)
        missing = [key for key in ("shapes", "init", "grads") if key not in scenario]
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path}: not a scenario ({type(error).__name__}: {error})"]) from error
    if missing:
        raise ConfigError([f"{path}: not a scenario: no {', '.join(missing)}"])
    if unknown:
        raise ConfigError(
            [f"{path}: config has {', '.join(unknown)}; what can be replayed: {', '.join(sorted(KNOWN))}"]
        )
    return scenario


def replay_scenario(scenario: Mapping[str, Any]) -> Replayed:
    """Run a scenario to its last inner step. Raises DeadlineError, or what an island raised."""
    cfg = scenario["config"]
    job = resolve_job(_job(cfg)).value
    names = [f"island-{number:03d}" for number in range(cfg["islands"])]
    replayed = Replayed([[] for _ in names])
    errors: list[BaseException] = []
    tokens = cfg["tokens_per_step"]
    block = int(np.lcm.reduce(tokens))
    steps = max(len(grads) for grads in scenario["grads"])
    sequences = block * (1 + steps * max(tokens) // block) * len(names)
    with tempfile.TemporaryDirectory(prefix="elastic-replay-") as folder:
        synchronizer = _synchronizer(scenario, job, names, sequences, block, Storage(folder), replayed)

        def live(number: int) -> None:
            torch.set_num_threads(1)
            inner = _ScriptedInner(scenario, number, replayed.local[number])
            rank = IslandRank(
                name=names[number],
                job=job,
                link=synchronizer,
                group=Group(),
                inner=inner,
                corpus=_Corpus(sequences),  # type: ignore[arg-type]
                events=_Silent(),
                versions=library_versions(),
                device="cpu",
            )
            rank.feed.batch_sequences = tokens[number]
            try:
                run_island(rank)
            except _Over:
                return
            except BaseException as error:  # raised again by the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(len(names))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=TIMEOUT_S)
                if thread.is_alive():
                    raise DeadlineError("the scenario did not end in time", saw=f"{TIMEOUT_S:g} s")
        finally:
            synchronizer.close()
    if errors:
        raise errors[0]
    return replayed


def _job(cfg: Mapping[str, Any]) -> config.Job:
    outer = {
        "preset": "diloco",
        "warmup": 0.0,
        "sync_every": cfg["sync_every"],
        "fragments": cfg["fragments"],
        "overlap_steps": cfg["overlap_steps"],
        "lr": cfg["outer"]["lr"],
        "momentum": cfg["outer"]["momentum"],
        "mix": cfg.get("mix", "blend"),
        "codec_up": cfg.get("codec_up", "fp32"),
        "codec_down": cfg.get("codec_down", "fp32"),
        "weights": cfg.get("weights", "tokens"),
        "island_timeout_s": TIMEOUT_S,
    }
    if outer["mix"] == "blend":
        outer["alpha"] = cfg["alpha"]
    return config.Job.model_validate(
        {"name": "scenario", "data": {"seq_len": 1}, "budget": {"tokens": 1}, "outer": outer}
    )


def _synchronizer(
    scenario: Mapping[str, Any],
    job: config.Job,
    names: list[str],
    sequences: int,
    block: int,
    storage: Storage,
    replayed: Replayed,
) -> Synchronizer:
    model = _module(scenario)
    tensors = _tensors(scenario["init"], scenario["shapes"])
    fragments = fragments_of(model, job.outer)
    setup = RunSetup(
        job=job,
        run=job.name,
        epoch=1,
        islands=tuple(names),
        total_sequences=sequences,
        block_sequences=block,
        validation_sequences=1,
        tokens_per_byte=1.0,
        vocab_size=1,
    )
    store = OuterStore.open(
        storage,
        job,
        job.name,
        1,
        Lineage([]),
        lambda: [{name: tensors[name] for name in part} for part in fragments],
        {"total_sequences": sequences, "block_sequences": block},
        lambda name, reason, instead: None,
    )
    commit = store.commit_outer

    def commit_and_note(fragment: int, version: int, *arguments: Any) -> dict[str, Tensor]:
        packet = commit(fragment, version, *arguments)
        params = _flat(store.states[fragment].published)
        replayed.published.append({"fragment": fragment, "version": version, "params": params})
        return packet

    store.commit_outer = commit_and_note  # type: ignore[method-assign, assignment]
    return Synchronizer(setup, store, parameter_fingerprint(store.shapes, fragments), _Silent())


class _ScriptedInner(Inner):
    """An island whose gradients are read from the scenario, with its own constant learning rate."""

    def __init__(self, scenario: Mapping[str, Any], island: int, seen: list[Values]) -> None:
        inner = scenario["config"]["inner"]
        super().__init__(_module(scenario), config.Inner(batch_sequences=1))
        self._script, self._shapes_of = scenario["grads"][island], scenario["shapes"]
        self._seen, self._lr, self._taken = seen, inner["lr"], 0
        self._optimizer = AdamW(
            self.local(),
            decayed=frozenset(self.parameters),
            betas=tuple(inner["betas"]),
            eps=inner["eps"],
            weight_decay=inner["weight_decay"],
        )

    def gradient(self, batch: np.ndarray) -> Loss:
        """The scripted gradient of the next step; before it, note what the last step led to."""
        if self._taken:
            self._seen.append(_flat(self.local()))
        if self._taken == len(self._script):
            raise _Over
        self.set_gradients(_tensors(self._script[self._taken], self._shapes_of))
        self._taken += 1
        return Loss(torch.zeros(()), len(batch))

    def clip(self, norm: float | None = None) -> float:
        """Scripted gradients are taken as they are."""
        return 0.0

    def step(self, lr: float) -> None:
        """AdamW at the scenario's rate."""
        super().step(self._lr)


class _Corpus:
    """As many sequences as are asked for; nobody looks into them."""

    def __init__(self, sequences: int) -> None:
        self.train = self.validation = self
        self._sequences = sequences

    def __len__(self) -> int:
        return self._sequences

    def take(self, ids: np.ndarray) -> np.ndarray:
        """Sequences of one predicted token, so that tokens are sequences."""
        return np.zeros((len(ids), 2), dtype=np.int64)


class _Silent:
    """Nobody listens."""

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Drop the event."""


def _module(scenario: Mapping[str, Any]) -> nn.Module:
    """A module with the scenario's parameters; `layers.<n>.*` are its blocks."""
    root = nn.Module()
    for name, tensor in _tensors(scenario["init"], scenario["shapes"]).items():
        *path, leaf = name.split(".")
        here = root
        for key in path:
            if not hasattr(here, key):
                here.add_module(key, nn.ModuleList() if key == "layers" else nn.Module())
            here = here.get_submodule(key)
        here.register_parameter(leaf, nn.Parameter(tensor))
    return root


def _tensors(flat: Mapping[str, list[float]], shapes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    return {name: torch.tensor(flat[name]).reshape(shape) for name, shape in shapes.items()}


def _flat(tensors: Mapping[str, Tensor]) -> Values:
    return {name: value.flatten().tolist() for name, value in tensors.items()}
