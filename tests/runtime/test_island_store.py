"""The checkpoints of one island, as its loop saves and loads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.base.ranges import RangeSet
from elastic.exchange.link import Basis
from elastic.runtime.island_store import IslandStore, Saved
from elastic.runtime.progress import Progress, Since, UnderWay
from elastic.state.storage import Storage
from elastic.training.group import Group

pytestmark = pytest.mark.unit


def _store(lab: Any, inner: Any, **life: Any) -> IslandStore:
    return IslandStore(Storage(lab.folder), "us", Group(), inner.parameters, lab, **life)


def _saved(inner: Any, step: int) -> Saved:
    parameters = {name: torch.full_like(rows, float(step)) for name, rows in inner.local().items()}
    moments = {name: (rows + 0.25, rows + 0.5) for name, rows in parameters.items()}
    held, rest = RangeSet([(0, 8), (20, 24)]), RangeSet([(8, 16)])
    name, rows = next(iter(parameters.items()))
    sent = UnderWay(1, 1, 3, 3, 0, 5, 80, 5, RangeSet([(24, 28)]), 2.5)
    progress = Progress(
        versions=[4, 3],
        position=7,
        start=2,
        since=[Since(2, 32, 1.5), Since(0, 0, 0.0)],
        ahead=[2, 5],
        held=[held, RangeSet()],
        under_way=[sent],
        sent_now=[1],
        adopted_now=[0],
        missed=RangeSet([(40, 44)]),
        basis=Basis(160, 64, 1600),
    )
    return Saved(step, rest, 40 + step, parameters, moments, progress, {name: rows * 3})


def test_what_is_saved_is_loaded(lab: Any) -> None:
    """Parameters, moments and every number of the island come back as they were."""
    inner = lab.inner(lab.job())
    store = _store(lab, inner)
    assert store.load() is None
    saved = _saved(inner, 7)
    store.save(saved, generation=1)
    loaded = _store(lab, inner, epoch=2).load()
    assert loaded is not None
    for name in ("step", "rest", "adam_steps", "progress"):
        assert getattr(loaded, name) == getattr(saved, name), name
    assert loaded.snapshots.keys() == saved.snapshots.keys()
    assert all(torch.equal(loaded.snapshots[name], rows) for name, rows in saved.snapshots.items())
    for name, rows in saved.parameters.items():
        assert torch.equal(loaded.parameters[name], rows)
        for ours, theirs in zip(loaded.moments[name], saved.moments[name], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("later", [{"epoch": 2, "generation": 1}, {"epoch": 1, "generation": 3}])
def test_the_newest_life_counts(lab: Any, later: dict[str, int]) -> None:
    """A later attempt, or a later generation of the same, is newer even if its step is lower."""
    inner = lab.inner(lab.job())
    first = _store(lab, inner, epoch=1)
    for step in (5, 9):
        first.save(_saved(inner, step), generation=2)
    _store(lab, inner, epoch=later["epoch"]).save(_saved(inner, 6), generation=later["generation"])
    loaded = _store(lab, inner).load()
    assert loaded is not None
    assert loaded.step == 6


def test_only_the_newest_are_kept(lab: Any) -> None:
    """Older complete checkpoints are let go."""
    inner = lab.inner(lab.job())
    store = _store(lab, inner, keep=2)
    names = [store.save(_saved(inner, step), generation=1) for step in range(4)]
    left = {name.rpartition("/")[0] for name in Storage(lab.folder).list("islands")}
    assert left == set(names[2:])


def test_a_damaged_checkpoint_is_named_and_skipped(lab: Any) -> None:
    """One flipped byte: the one before is used, and an event says which was bad."""
    inner = lab.inner(lab.job())
    store = _store(lab, inner)
    store.save(_saved(inner, 5), generation=1)
    bad = store.save(_saved(inner, 8), generation=1)
    storage = Storage(lab.folder)
    (file,) = [name for name in storage.list(bad) if name.endswith(".safetensors")]
    data = bytearray(storage.read(file))
    data[-1] ^= 1
    storage.write(file, bytes(data))
    loaded = _store(lab, inner).load()
    assert loaded is not None
    assert loaded.step == 5
    ((kind, fields),) = lab.facts
    assert (kind, fields["name"]) == ("fell_back", bad)
