"""The checkpoints of one island, as its loop sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.base.events import EventSink
from elastic.base.ranges import RangeSet
from elastic.runtime.progress import Progress
from elastic.state.checkpoint import Rows, find_island, load_island, read_meta, retire_islands, save_island
from elastic.state.layout import island_folder
from elastic.state.storage import Storage
from elastic.training.group import Group
from elastic.training.shard import rows_of, spoken_rows

SAVES_PER_GENERATION = 1_000_000
_NUMBERS = ("step", "adam_steps")


@dataclass
class Saved:
    """An island at one moment: what its next incarnation needs to go on from there.

    Tensors are this rank's rows; everything else is the whole island's.
    """

    step: int
    rest: RangeSet
    """Positions leased and not trained."""
    adam_steps: int
    parameters: dict[str, torch.Tensor]
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]]
    progress: Progress
    """Where it stands towards the other islands."""
    snapshots: dict[str, torch.Tensor] = field(default_factory=dict)
    """Values at the snapshots of the contributions under way."""


class IslandStore:
    """Saves and loads one rank's part of the island's checkpoints.

    `epoch` and the island's generation order the checkpoints of several lives, also of those that
    Ray Train starts by itself when it resizes; `keep` complete ones stay.
    """

    def __init__(
        self,
        storage: Storage,
        island: str,
        group: Group,
        parameters: Mapping[str, torch.Tensor],
        events: EventSink,
        *,
        epoch: int = 1,
        keep: int = 2,
    ) -> None:
        self._storage, self._prefix, self._group = storage, island_folder(island), group
        self._parameters, self._events, self._keep = parameters, events, keep
        self._epoch, self._saves = epoch, 0

    def save(self, saved: Saved, generation: int) -> str:
        """Write this rank's rows; returns the checkpoint's name. It counts once all ranks wrote."""
        rows: dict[str, Rows] = {}
        for name, parameter in self._parameters.items():
            start, stop = spoken_rows(parameter, self._group.rank)
            if (start, stop) == (0, 0):
                continue
            tensors = (saved.parameters[name], *saved.moments[name])
            kinds = dict(zip(("local", "exp_avg", "exp_avg_sq"), tensors, strict=True))
            if name in saved.snapshots:
                kinds["snapshot"] = saved.snapshots[name]
            for kind, local in kinds.items():
                rows[f"{kind}/{name}"] = Rows(start, local, tuple(parameter.shape))
        meta: dict[str, Any] = {name: getattr(saved, name) for name in _NUMBERS}
        meta |= {"rest": saved.rest.to_json(), "progress": saved.progress.to_json()}
        meta["snapshots"] = sorted(saved.snapshots)
        name = save_island(
            self._storage,
            self._prefix,
            rank=self._group.rank,
            world_size=self._group.world_size,
            generation=self._epoch,
            number=generation * SAVES_PER_GENERATION + self._saves,
            step=saved.step,
            rows=rows,
            meta=meta,
        )
        self._saves += 1
        if self._group.rank == 0:
            retire_islands(self._storage, self._prefix, self._keep)
        return name

    def load(self) -> Saved | None:
        """This rank's rows of the newest usable checkpoint, whatever the number of ranks that wrote it."""

        def newest() -> str:
            found = find_island(self._storage, self._prefix)
            for skipped in found.skipped:
                fields = {"name": skipped.name, "reason": skipped.reason, "instead": found.name or "none"}
                self._events.emit("fell_back", fields)
            return found.name

        name = self._group.share(newest)
        if not name:
            return None
        meta = read_meta(self._storage, name)
        places = {
            key: (*rows_of(parameter), tuple(parameter.shape)) for key, parameter in self._parameters.items()
        }
        placement = {
            f"{kind}/{key}": place
            for key, place in places.items()
            for kind in ("local", "exp_avg", "exp_avg_sq")
        }
        placement |= {f"snapshot/{key}": places[key] for key in meta["snapshots"]}
        loaded = load_island(self._storage, name, placement)
        return Saved(
            **{key: loaded.meta[key] for key in _NUMBERS},
            rest=RangeSet.from_json(loaded.meta["rest"]),
            progress=Progress.from_json(loaded.meta["progress"]),
            snapshots={key: loaded.tensors[f"snapshot/{key}"] for key in meta["snapshots"]},
            parameters={key: loaded.tensors[f"local/{key}"] for key in self._parameters},
            moments={
                key: (loaded.tensors[f"exp_avg/{key}"], loaded.tensors[f"exp_avg_sq/{key}"])
                for key in self._parameters
            },
        )
