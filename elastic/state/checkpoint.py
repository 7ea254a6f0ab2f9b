"""Island checkpoints: each rank writes its rows, and any number of ranks reads them back.

A checkpoint is a folder `<prefix>/<generation>-<number>-<step>/`. Rank r of w writes
`<r>-of-<w>.safetensors`, the rows it holds of every tensor, and then the marker `<r>-of-<w>.json`:
sealed JSON with the file's hash and, per tensor, first row, rows and full shape. The checkpoint is
complete when the markers of all w ranks are there. Nothing is a pickle and no rank waits for another
(docs/design/0004-island-checkpoints.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.base.errors import IntegrityError
from elastic.base.ranges import RangeSet
from elastic.state import tensors
from elastic.state.canonical import seal, unseal
from elastic.state.records import Skipped
from elastic.state.storage import Storage
from elastic.state.tensors import Stored

Placement = Mapping[str, tuple[int, int, tuple[int, ...]]]
"""name -> (first row, one past the last row, full shape); (0, 1, ()) for a tensor without dimensions."""

_FOLDER = re.compile(r"(\d+)-(\d+)-s(\d+)")
_MARKER = re.compile(r"(\d+)-of-(\d+)\.json")


@dataclass(frozen=True)
class Rows:
    """The rows `start .. start + local.shape[0]` of a tensor whose whole shape is `full_shape`."""

    start: int
    local: torch.Tensor
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that can be used ("" if there is none), and those that cannot."""

    name: str
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedIsland:
    """What rank 0 said of the checkpoint, and the rows that were asked for."""

    meta: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """What one marker says."""

    stored: Stored
    rows: dict[str, tuple[int, int]]
    kinds: dict[str, tuple[tuple[int, ...], torch.dtype]]
    meta: dict[str, Any]


def save_island(
    storage: Storage,
    prefix: str,
    *,
    rank: int,
    world_size: int,
    generation: int,
    number: int,
    step: int,
    rows: Mapping[str, Rows],
    meta: Mapping[str, Any],
) -> str:
    """Write this rank's part; returns the checkpoint's name, the same on all ranks.

    `generation` and `number` (a count of the saves in this generation, the same on all ranks) order
    checkpoints: the highest is the newest. `meta` is JSON about the whole island; rank 0's is kept.
    A rank leaves out tensors, or gives no rows of them, if others speak for them.
    """
    name = f"{prefix}/{generation:06d}-{number:06d}-s{step:010d}"
    part = f"{name}/{rank:05d}-of-{world_size:05d}"
    stored = tensors.save(storage, f"{part}.safetensors", {key: value.local for key, value in rows.items()})
    about = {
        key: [r.start, _num_rows(r.local), list(r.full_shape), str(r.local.dtype).removeprefix("torch.")]
        for key, r in rows.items()
    }
    marker = {"file": stored.to_json(), "tensors": about, "meta": dict(meta) if rank == 0 else {}}
    data, _ = seal(marker, where=f"{part}.json")
    storage.write(f"{part}.json", data)
    return name


def find_island(storage: Storage, prefix: str) -> Found:
    """The newest complete checkpoint whose hashes are right; reads every file of it once.

    One rank asks, and tells the others the name: all must load the same checkpoint.
    """
    skipped: list[Skipped] = []
    for name, files in _checkpoints(storage, prefix):
        try:
            for part in _parts(storage, name, files):
                tensors.verify(storage, part.stored)
        except IntegrityError as error:
            skipped.append(Skipped(name, str(error).partition("\n")[0]))
            continue
        return Found(name, skipped)
    return Found("", skipped)


def check_islands_of(storage: Storage, prefix: str) -> tuple[int, int, list[Skipped]]:
    """For the audit: how many checkpoints are complete and right, how many unfinished, and the bad ones."""
    good, unfinished, bad = 0, 0, []
    for name, files in _checkpoints(storage, prefix):
        if _world_size(files) is None:
            unfinished += 1
            continue
        try:
            for part in _parts(storage, name, files):
                tensors.verify(storage, part.stored)
            good += 1
        except IntegrityError as error:
            bad.append(Skipped(error.where or name, f"{error.what}; saw {error.saw}"))
    return good, unfinished, bad


def read_meta(storage: Storage, name: str) -> dict[str, Any]:
    """What rank 0 said of a checkpoint."""
    return _parts(storage, name, storage.list(name))[0].meta


def load_island(storage: Storage, name: str, placement: Placement) -> LoadedIsland:
    """Read the rows of `placement` from a checkpoint of any number of ranks, to new CPU tensors.

    Only files that hold wanted rows are read. Raises IntegrityError unless the checkpoint has exactly
    the wanted tensors, with the wanted shapes, and every wanted row: nothing is left unfilled.
    """
    parts = _parts(storage, name, storage.list(name))
    kinds = _check_tensors(name, parts, placement)
    loaded = {
        key: torch.empty((stop - start, *shape[1:]) if shape else (), dtype=kinds[key])
        for key, (start, stop, shape) in placement.items()
    }
    filled: dict[str, list[tuple[int, int]]] = {key: [] for key in placement}
    for part in parts:
        overlap = _overlap(part, placement)
        inside = {key: (a - part.rows[key][0], b - part.rows[key][0]) for key, (a, b) in overlap.items()}
        for key, values in tensors.load_rows(storage, part.stored, inside).items() if inside else ():
            start, stop = overlap[key]
            first = placement[key][0]
            target = loaded[key][start - first : stop - first] if loaded[key].ndim else loaded[key]
            target.copy_(values)
            filled[key].append((start, stop))
    for key, (start, stop, _) in placement.items():
        if RangeSet(filled[key]) != RangeSet([(start, stop)]):
            saw = f"{filled[key]}, wanted {start} to {stop}"
            raise IntegrityError("rows are missing", where=f"{name}: {key}", saw=saw)
    return LoadedIsland(parts[0].meta, loaded)


def retire_islands(storage: Storage, prefix: str, keep: int) -> list[str]:
    """Delete all but the newest `keep` complete checkpoints; returns the names of those deleted.

    An incomplete checkpoint goes once a newer one is complete, never before. Markers are deleted
    first, so that a kill in the middle leaves an incomplete checkpoint, not a bad one.
    """
    complete = 0
    deleted: list[str] = []
    for name, files in _checkpoints(storage, prefix):
        whole = _world_size(files) is not None
        if complete >= keep or (complete and not whole):
            for file in sorted(files, key=lambda file: not file.endswith(".json")):
                storage.delete(file)
            deleted.append(name)
        complete += whole
    return deleted


# -------------------------------------------------------------------------------------- inside


def _checkpoints(storage: Storage, prefix: str) -> list[tuple[str, list[str]]]:
    """Folders of checkpoints with their files, newest first."""
    folders: dict[tuple[int, ...], tuple[str, list[str]]] = {}
    for file in storage.list(prefix):
        folder = file[len(prefix) + 1 :].partition("/")[0]
        match = _FOLDER.fullmatch(folder)
        if match:
            order = tuple(int(number) for number in match.groups())
            folders.setdefault(order, (f"{prefix}/{folder}", []))[1].append(file)
    return [folders[order] for order in sorted(folders, reverse=True)]


def _world_size(files: Sequence[str]) -> int | None:
    """The number of ranks of a complete checkpoint, None if markers are missing."""
    ranks: dict[int, set[int]] = {}
    for file in files:
        match = _MARKER.fullmatch(file.rpartition("/")[2])
        if match:
            ranks.setdefault(int(match[2]), set()).add(int(match[1]))
    whole = [size for size, seen in ranks.items() if seen == set(range(size))]
    return whole[0] if len(whole) == 1 else None


def _parts(storage: Storage, name: str, files: Sequence[str]) -> list[_Part]:
    """The markers of a complete checkpoint, in the order of ranks; raises IntegrityError if it is not."""
    world_size = _world_size(files)
    if world_size is None:
        markers = sum(file.endswith(".json") for file in files)
        raise IntegrityError("the checkpoint is not complete", where=name, saw=f"{markers} markers")
    names = [f"{name}/{rank:05d}-of-{world_size:05d}.json" for rank in range(world_size)]
    contents = storage.read_many(names)
    return [_read_marker(marker, contents.get(marker, b"")) for marker in names]


def _read_marker(name: str, data: bytes) -> _Part:
    fields = unseal(data, where=name)
    try:
        about = fields["tensors"]
        part = _Part(
            Stored.from_json(fields["file"]),
            {key: (start, start + count) for key, (start, count, _, _) in about.items()},
            {key: (tuple(shape), getattr(torch, kind)) for key, (_, _, shape, kind) in about.items()},
            fields["meta"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError("not a checkpoint marker", where=name, saw=repr(error)) from error
    if part.stored.name != name.removesuffix(".json") + ".safetensors":
        raise IntegrityError("the marker belongs to another file", where=name, saw=part.stored.name)
    return part


def _check_tensors(name: str, parts: Sequence[_Part], placement: Placement) -> dict[str, torch.dtype]:
    """The type of each tensor; raises IntegrityError unless names and full shapes are the wanted ones."""
    kinds = {key: kind for part in parts for key, kind in part.kinds.items()}
    missing, unknown = sorted(placement.keys() - kinds.keys()), sorted(kinds.keys() - placement.keys())
    if missing or unknown:
        raise IntegrityError(
            "the checkpoint holds other tensors than the model",
            where=name,
            saw=f"missing {missing[:3]}, unknown {unknown[:3]}",
            fix="continue with the model with which the run began",
        )
    for key, (_, _, shape) in placement.items():
        if kinds[key][0] != tuple(shape):
            saw = f"{list(kinds[key][0])}, expected {list(shape)}"
            raise IntegrityError("a tensor has another shape", where=f"{name}: {key}", saw=saw)
    return {key: kind for key, (_, kind) in kinds.items()}


def _overlap(part: _Part, placement: Placement) -> dict[str, tuple[int, int]]:
    """The wanted rows that a part holds, by their numbers in the whole tensor; without empty ones."""
    both = {
        key: (max(start, part.rows[key][0]), min(stop, part.rows[key][1]))
        for key, (start, stop, _) in placement.items()
        if key in part.rows
    }
    return {key: (start, stop) for key, (start, stop) in both.items() if start < stop}


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1
