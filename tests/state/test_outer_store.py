"""The outer state: durable before it is visible, the same bits after a restart, files let go in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.base.config import Job
from elastic.base.errors import LockHeldError, StorageError
from elastic.base.ranges import RangeSet
from elastic.base.resolve import resolve_job
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.replay import committed_by, load_outer
from elastic.state.storage import Storage
from elastic.training.digest import digest

pytestmark = pytest.mark.unit

Tensors = dict[str, torch.Tensor]


def _draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(5, 4, generator=generator), "b": torch.randn(4, generator=generator)}


def _open(folder: Path, epoch: int = 1, **outer: Any) -> OuterStore:
    settings = {"preset": "diloco", "lr": 0.7, "momentum": 0.9, "codec_down": "bf16", **outer}
    job = {"name": "run", "data": {"seq_len": 16}, "budget": {"tokens": 1600}, "outer": settings}
    job["checkpoint"] = {"snapshot_every": 3, "keep": 1}
    storage = Storage(folder)
    return OuterStore.open(
        storage, resolve_job(Job.model_validate(job)).value, "run-1", epoch, load_records(storage),
        lambda: [_draw(0)], {"total_sequences": 100, "block_sequences": 4}, lambda *entry: None,
    )  # fmt: skip


def _steps(store: OuterStore, count: int) -> None:
    for _ in range(count):
        version = store.version + 1
        ranges = RangeSet([(4 * version, 4 * version + 4)])
        store.commit_outer(0, version, [], ranges, _draw(version), 1.0)


def _bits(store: OuterStore) -> tuple[str, str, str]:
    state = store.states[0]
    return digest(state.theta), digest(state.momentum), digest(state.published)


@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
def test_six_steps_equal_some_a_restart_and_the_rest(tmp_path: Path, before: int) -> None:
    """Parameters, momentum and the rounding carried on are the same bits, wherever the restart falls."""
    whole = _open(tmp_path / "whole")
    _steps(whole, 6)
    _steps(_open(tmp_path / "cut"), before)
    cut = _open(tmp_path / "cut", epoch=2)
    assert cut.version == before
    _steps(cut, 6 - before)
    assert _bits(cut) == _bits(whole)
    assert digest(whole.states[0].theta) != digest(
        whole.states[0].published
    )  # bf16: there is something to carry on
    assert (cut.committed, cut.counters["outer_steps"]) == (whole.committed, 6)
    assert cut.counters["committed_tokens"] == 6 * 4 * 16


def test_a_step_by_hand(tmp_path: Path) -> None:
    """m = mu*m + s*d; theta = theta - lr*(s*d + mu*m), for two steps with scales."""
    store = _open(tmp_path, codec_down="fp32")
    theta, momentum = _draw(0)["w"].double(), torch.zeros(5, 4, dtype=torch.float64)
    for version, scale in ((1, 1.0), (2, 0.5)):
        d = _draw(version)["w"].double() * scale
        packet = store.commit_outer(0, version, [], RangeSet([(version, version + 1)]), _draw(version), scale)
        momentum = 0.9 * momentum + d
        theta = theta - 0.7 * (d + 0.9 * momentum)
        assert float((packet["w"].double() - theta).abs().max()) <= 1e-6


def test_a_round_in_which_nobody_trained_moves_nothing(tmp_path: Path) -> None:
    """The version rises; parameters and momentum stay, also when the records are replayed."""
    store = _open(tmp_path)
    _steps(store, 1)
    bits = _bits(store)
    store.commit_outer(0, 2, [], RangeSet(), None, 0.0)
    assert (_bits(store)[:2], store.version) == (bits[:2], 2)
    assert _bits(_open(tmp_path, epoch=2)) == _bits(store)


def test_a_step_is_durable_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """When the call returns, the record and its tensors are there; if it raises, they do not count."""
    store = _open(tmp_path)
    _steps(store, 1)
    lineage = load_records(store.storage)
    assert lineage.records[-1].body["version"] == 1
    assert digest(load_outer(store.storage, lineage).states[0].published) == store.digest

    def refuse(*arguments: Any) -> None:
        raise StorageError("away")

    store.log.append = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(StorageError):
        _steps(store, 1)
    again = _open(tmp_path, epoch=2)
    assert (again.version, again.committed) == (1, RangeSet([(4, 8)]))


def test_an_anchor_holds_the_moments(tmp_path: Path) -> None:
    """After a synchronous stretch parameters and both moments come back, and momentum starts at zero."""
    store = _open(tmp_path)
    moments = {f"exp_avg/{name}": value for name, value in _draw(7).items()}
    moments |= {f"exp_avg_sq/{name}": value for name, value in _draw(8).items()}
    store.commit_anchor(1, [], RangeSet([(0, 40)]), _draw(5), moments, 10, "synchronous")
    again = _open(tmp_path, epoch=2)
    assert digest(again.states[0].theta) == digest(_draw(5))
    assert digest(again.moments) == digest(moments)
    assert not any(value.any() for value in again.states[0].momentum.values())
    assert (again.adam_steps, again.phase, again.counters["synchronous_steps"]) == (10, "synchronous", 10)


def test_files_are_let_go_but_the_last_snapshot_leads_on(tmp_path: Path) -> None:
    """With one snapshot kept, nothing older than it stays, and the state can still be loaded."""
    store = _open(tmp_path)
    _steps(store, 7)
    versions = sorted({int(name.split("-v")[1][:8]) for name in store.storage.list("outer")})
    assert versions == [6, 7]
    assert _bits(_open(tmp_path, epoch=2)) == _bits(store)


def test_a_driver_that_lost_the_lock_cannot_write(tmp_path: Path) -> None:
    """After a newer epoch has begun, the records of an older one are on a branch that nobody reads."""
    old = _open(tmp_path)
    _steps(old, 1)
    new = _open(tmp_path, epoch=2)
    _steps(old, 1)
    _steps(new, 1)
    lineage = load_records(new.storage)
    assert [record.epoch for record in lineage.records] == [1, 1, 2, 2]
    assert committed_by(lineage.records) == RangeSet([(4, 12)])
    new.storage.create("state/000002-00000004.json", b"{}")  # another process of the same epoch
    with pytest.raises(LockHeldError, match="another driver writes records under this epoch"):
        _steps(new, 1)


def test_validations_are_part_of_the_state(tmp_path: Path) -> None:
    """What was judged is there after a restart; only the newest hundred are carried along."""
    store = _open(tmp_path)
    for number in range(105):
        store.commit_validation({"version": 0, "loss": float(number), "final": False})
    again = _open(tmp_path, epoch=2)
    assert [entry["loss"] for entry in again.validation] == [float(n) for n in range(5, 105)]
