"""Snapshots and deltas lead back to the same bits, and a bad file to an older state, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.base.config import Budget, Checkpoint, Job, Outer
from elastic.base.errors import IntegrityError
from elastic.base.ranges import RangeSet
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.replay import load_outer
from elastic.state.storage import Storage
from elastic.training.digest import digest

pytestmark = pytest.mark.unit

Tensors = dict[str, torch.Tensor]
Told = list[tuple[str, str, str]]


def draw(seed: int) -> Tensors:
    """Tensors of a small model."""
    generator = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(4, 3, generator=generator), "norm": torch.randn(3, generator=generator)}


class Run:
    """A run whose synchronizer is driven by hand: snapshots every 4 versions, 2 are kept."""

    def __init__(self, folder: Path, codec: str = "bf16") -> None:
        self.storage = Storage(folder)
        outer = Outer(lr=0.7, momentum=0.9, codec_down=codec)
        self.job = Job(
            name="run",
            budget=Budget(tokens=1000),
            outer=outer,
            checkpoint=Checkpoint(snapshot_every=4, keep=2),
        )
        self.epoch = 0
        self.store = self.attempt()

    def attempt(self, told: Told | None = None) -> OuterStore:
        """A new driver goes on from what is stored."""
        self.epoch += 1
        told = [] if told is None else told
        self.store = OuterStore.open(
            self.storage, self.job, "run-1", self.epoch, load_records(self.storage), lambda: [draw(0)],
            {"total_sequences": 400, "block_sequences": 4}, lambda *entry: told.append(entry),
        )  # fmt: skip
        return self.store

    def step(self, moved: bool = True) -> None:
        """One outer step."""
        version = self.store.version + 1
        ranges = RangeSet([(4 * version - 4, 4 * version)])
        self.store.commit_outer(0, version, [], ranges, draw(version) if moved else None, 0.5)

    def anchor(self) -> None:
        """A stretch of synchronous steps."""
        version = self.store.version + 1
        moments = {f"exp_avg/{k}": v for k, v in draw(100).items()}
        moments |= {f"exp_avg_sq/{k}": v for k, v in draw(101).items()}
        ranges = RangeSet([(4 * version - 4, 4 * version)])
        self.store.commit_anchor(version, [], ranges, draw(version), moments, 5, "outer")

    def damage(self, version: int, what: str) -> str:
        """Flip one bit of a stored tensor file; returns its name."""
        found = [n for n in self.storage.list("outer") if f"-v{version:08d}-" in n and f".{what}." in n]
        data = bytearray(self.storage.read(found[-1]))
        data[-1] ^= 1
        self.storage.write(found[-1], bytes(data))
        return found[-1]

    def load(self):
        """What a new driver would find, and what it would be told."""
        told: Told = []
        loaded = load_outer(self.storage, load_records(self.storage), lambda *entry: told.append(entry))
        return loaded, told


def same(left: Tensors, right: Tensors) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_resumed_run_equals_one_that_was_never_stopped(tmp_path: Path, codec: str) -> None:
    """Eleven steps straight, or with a new driver after each: theta, momentum, published, digest agree."""
    straight, stopped = Run(tmp_path / "a", codec), Run(tmp_path / "b", codec)
    for version in range(1, 12):
        moved = version != 6  # a step to which nobody contributed still carries the rounding error on
        straight.step(moved)
        stopped.attempt()
        stopped.step(moved)
        assert same(straight.store.states[0].theta, stopped.store.states[0].theta)
        assert same(straight.store.states[0].momentum, stopped.store.states[0].momentum)
        assert same(straight.store.states[0].published, stopped.store.states[0].published)
        assert straight.store.digest == stopped.store.digest
    loaded, told = stopped.load()
    assert told == []
    assert loaded.version == 11
    assert loaded.committed == RangeSet([(0, 44)])
    assert any(bool(m.abs().sum()) for m in loaded.states[0].momentum.values())


def test_an_anchor_brings_its_moments_back(tmp_path: Path) -> None:
    """After synchronous steps AdamW's moments and their number come with the parameters."""
    run = Run(tmp_path / "run")
    run.anchor()
    run.anchor()
    run.step()
    loaded, _ = run.load()
    assert loaded.adam_steps == 10
    assert sorted(loaded.moments) == sorted(f"{m}/{p}" for m in ("exp_avg", "exp_avg_sq") for p in draw(0))
    assert same({k[8:]: v for k, v in loaded.moments.items() if k.startswith("exp_avg/")}, draw(100))
    assert same(loaded.states[0].theta, run.store.states[0].theta)


def test_a_bad_snapshot_leads_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    """With the newest snapshot damaged, the older one and all deltas after it give the same bits."""
    run = Run(tmp_path / "run")
    for _ in range(10):
        run.step()
    bad = run.damage(8, "snapshot")
    loaded, told = run.load()
    assert told[0][0] == bad
    assert "not what its record says" in told[0][1]
    assert "v00000004" in told[0][2]
    assert loaded.version == 10
    assert digest(loaded.states[0].published) == run.store.digest
    assert loaded.committed == RangeSet([(0, 40)])


def test_a_bad_snapshot_with_a_bad_delta_is_redone(tmp_path: Path) -> None:
    """With both files of a version damaged, the version before it is the state; the rest is redone."""
    run = Run(tmp_path / "run")
    seen: dict[int, str] = {}
    for _ in range(10):
        run.step()
        seen[run.store.version] = run.store.digest
    run.damage(8, "snapshot")
    run.damage(8, "delta")
    loaded, _ = run.load()
    assert digest(loaded.states[0].published) == seen[loaded.version]
    assert loaded.version == 7
    assert loaded.committed == RangeSet([(0, 28)])
    resumed = run.attempt()
    assert resumed.version == 7
    run.step()
    assert run.store.digest == seen[8]
    assert load_records(run.storage).skipped == []


def test_a_bad_delta_ends_the_replay_before_it(tmp_path: Path) -> None:
    """A damaged delta is named; the state is the version before it, and what came later is not committed."""
    run = Run(tmp_path / "run")
    for _ in range(7):
        run.step()
    bad = run.damage(6, "delta")
    loaded, told = run.load()
    assert [entry[0] for entry in told] == [bad]
    assert told[0][2] == "version 5"
    assert loaded.version == 5
    assert loaded.committed == RangeSet([(0, 20)])
    assert loaded.last.body["version"] == 5


def test_a_removed_record_is_told_and_its_steps_are_redone(tmp_path: Path) -> None:
    """A gap in the records leads back to the version before it, with every skipped record named."""
    run = Run(tmp_path / "run")
    for _ in range(6):
        run.step()
    names = run.storage.list("state")
    run.storage.delete(names[4])
    loaded, told = run.load()
    assert loaded.version == 3
    assert [entry[0] for entry in told] == names[4:]
    assert {entry[2] for entry in told} == {names[3]}


def test_without_a_usable_snapshot_it_is_an_error(tmp_path: Path) -> None:
    """If every snapshot is damaged the run stops with that reason, and does not start anew."""
    run = Run(tmp_path / "run")
    run.step()
    run.damage(0, "snapshot")
    with pytest.raises(IntegrityError, match="no snapshot of the outer parameters"):
        run.load()


def test_deltas_that_give_other_bits_are_not_used(tmp_path: Path) -> None:
    """If the replay does not reach the recorded digest, only the snapshot itself is believed."""
    run = Run(tmp_path / "run")
    for _ in range(5):
        run.step()
    run.store.versions[0], run.store._sums[0] = 6, torch.zeros(2, dtype=torch.int64)
    run.store._commit(
        "outer", 0, 6, [], RangeSet(), _stored(run), {"scale": 0.5, "moved": True, **_optimiser(run)}
    )
    loaded, told = run.load()
    assert "other bits" in told[0][1]
    assert loaded.version == 4


def test_only_retained_files_remain_and_are_known(tmp_path: Path) -> None:
    """`kept` names exactly the tensor files in the folder, so that retirement goes on after a resume."""
    run = Run(tmp_path / "run")
    for _ in range(18):
        run.step()
        loaded, _ = run.load()
        assert sorted(name for _, _, _, name in loaded.kept) == run.storage.list("outer")
        assert sum(what == "snapshot" for _, _, what, _ in loaded.kept) <= 2
        if run.store.version % 5 == 0:
            run.attempt()


def _stored(run: Run) -> dict[str, object]:
    return next(r.body["tensors"] for r in load_records(run.storage).records[::-1] if "tensors" in r.body)


def _optimiser(run: Run) -> dict[str, object]:
    outer = run.job.outer
    return {"optimiser": {"lr": outer.lr, "momentum": outer.momentum, "codec_down": outer.codec_down}}
