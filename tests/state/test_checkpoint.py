"""Island checkpoints: complete or not there, any number of ranks, nothing filled in silence."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from elastic.base.errors import IntegrityError
from elastic.state.checkpoint import Rows, find_island, load_island, retire_islands, save_island
from elastic.state.storage import Storage
from elastic.training.shard import chunk

pytestmark = pytest.mark.unit

PREFIX = "islands/us"


@pytest.fixture(params=["path", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A run folder on a disk and in a bucket."""
    return Storage(str(tmp_path / "run") if request.param == "path" else f"memory://{tmp_path}/run")


def island(seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters and moments of an island, with awkward shapes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (7, 3), "norm": (5,), "one-row": (1, 4), "scale": (), "cube": (4, 2, 2)}
    tensors = {f"parameters/{k}": torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    tensors |= {f"exp_avg/{k}": torch.randn(shape, generator=generator) for k, shape in shapes.items()}
    return tensors | {"rounded": torch.randn(6, 2, generator=generator).to(torch.bfloat16)}


def cut(tensors: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, Rows]:
    """What FSDP2 leaves on a rank; a scalar is on all of them and rank 0 speaks for it."""
    rows = {}
    for name, tensor in tensors.items():
        if tensor.ndim:
            start, stop = chunk(tensor.shape[0], world_size, rank)
            rows[name] = Rows(start, tensor[start:stop], tuple(tensor.shape))
        elif rank == 0:
            rows[name] = Rows(0, tensor, ())
    return rows


def placement(tensors: dict[str, torch.Tensor], rank: int, world_size: int):
    """Which rows a rank wants."""
    return {
        name: (*(chunk(t.shape[0], world_size, rank) if t.ndim else (0, 1)), tuple(t.shape))
        for name, t in tensors.items()
    }


def save(
    storage: Storage,
    tensors: dict[str, torch.Tensor],
    *,
    world_size: int = 2,
    number: int = 0,
    generation: int = 1,
) -> str:
    """All ranks save, the last one first."""
    names = {
        save_island(
            storage,
            PREFIX,
            rank=rank,
            world_size=world_size,
            generation=generation,
            number=number,
            step=100 * number,
            rows=cut(tensors, rank, world_size),
            meta={"step": 100 * number, "held": [[0, 8]], "rank": rank},
        )
        for rank in reversed(range(world_size))
    }
    assert len(names) == 1
    return names.pop()


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(storage: Storage, before: int, after: int) -> None:
    """Saved by `before` ranks, loaded by `after`: every row of every tensor comes back bit for bit."""
    tensors = island()
    name = save(storage, tensors, world_size=before, number=3)
    assert find_island(storage, PREFIX).name == name
    for rank in range(after):
        loaded = load_island(storage, name, placement(tensors, rank, after))
        assert loaded.meta == {"step": 300, "held": [[0, 8]], "rank": 0}
        assert loaded.tensors.keys() == tensors.keys()
        for key, rows in cut(tensors, rank, after).items():
            assert loaded.tensors[key].dtype == rows.local.dtype
            assert torch.equal(loaded.tensors[key], rows.local)
        assert torch.equal(loaded.tensors["parameters/scale"], tensors["parameters/scale"])


def test_no_checkpoint_is_not_an_error(storage: Storage) -> None:
    """An island that has never saved finds nothing, and nothing was skipped."""
    found = find_island(storage, PREFIX)
    assert (found.name, found.skipped) == ("", [])


def test_the_newest_is_the_last_of_the_highest_generation(storage: Storage) -> None:
    """A restarted island may be behind in steps and still be the newer one."""
    save(storage, island(1), generation=1, number=9)
    newest = save(storage, island(2), generation=2, number=1)
    save(storage, island(3), generation=2, number=0)
    assert find_island(storage, PREFIX).name == newest


def test_islands_with_similar_names_stay_apart(storage: Storage) -> None:
    """`us` does not see the checkpoints of `us-east`."""
    save_island(
        storage, "islands/us-east", rank=0, world_size=1, generation=9, number=9, step=1,
        rows=cut(island(), 0, 1), meta={},
    )  # fmt: skip
    assert find_island(storage, PREFIX).name == ""


def test_a_checkpoint_is_found_only_when_every_rank_is_done(storage: Storage) -> None:
    """Until the last marker is there, the previous checkpoint is used, and the new one is named."""
    older = save(storage, island(1), number=1)
    newer = save(storage, island(2), number=2)
    marker = f"{newer}/00001-of-00002.json"
    data = storage.read(marker)
    storage.delete(marker)
    found = find_island(storage, PREFIX)
    assert found.name == older
    assert [skipped.name for skipped in found.skipped] == [newer]
    assert "not complete" in found.skipped[0].reason
    storage.write(marker, data)
    assert find_island(storage, PREFIX).name == newer


def test_any_damage_leads_to_the_previous_one_by_name(storage: Storage) -> None:
    """A deleted, cut or altered file, wherever, is found by its hash; the older checkpoint is used."""
    older = save(storage, island(1), number=1)
    newer = save(storage, island(2), number=2)
    chosen = random.Random(0)
    for file in storage.list(newer):
        data = storage.read(file)
        flipped = bytearray(data)
        flipped[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        for damaged in (None, data[: len(data) // 2], b"", bytes(flipped)):
            if damaged is None:
                storage.delete(file)
            else:
                storage.write(file, damaged)
            found = find_island(storage, PREFIX)
            assert found.name == older
            assert [skipped.name for skipped in found.skipped] == [newer]
            storage.write(file, data)
    assert find_island(storage, PREFIX).name == newer


def test_a_save_cut_short_at_any_write_never_misleads(tmp_path: Path) -> None:
    """Killed after any number of writes, a save leaves the previous checkpoint in force."""
    storage = Storage(tmp_path / "run")
    older = save(storage, island(1), number=1)

    class Killed(BaseException):
        pass

    for writes in range(4):
        left = [writes]

        def spend(left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1

        class Fragile(Storage):
            def publish(self, name, fill, spend=spend):
                spend()
                return super().publish(name, fill)

            def write(self, name, data, spend=spend):
                spend()
                super().write(name, data)

        with pytest.raises(Killed):
            save(Fragile(tmp_path / "run"), island(2), number=2)
        assert find_island(storage, PREFIX).name == older


@pytest.mark.skipif(sys.platform == "darwin", reason="fork after torch is not safe there")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_sigkill_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """Killed with SIGKILL while it saves and retires, a process leaves a complete checkpoint, none bad."""
    storage = Storage(tmp_path / "run")
    chosen = random.Random(0)
    newest = save(storage, island(0), number=0)
    for generation in range(2, 22):
        child = os.fork()
        if child == 0:
            try:
                for number in range(1000):
                    save(storage, island(number), generation=generation, number=number)
                    retire_islands(storage, PREFIX, 2)
            finally:
                os._exit(1)
        time.sleep(chosen.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = find_island(storage, PREFIX)
        assert found.name >= newest
        assert all("not complete" in skipped.reason for skipped in found.skipped)
        tensors = island(int(found.name.rpartition("-s")[2]) // 100)
        loaded = load_island(storage, found.name, placement(tensors, 0, 1)).tensors
        assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
        newest = found.name
    storage.clean_leftovers()
    assert not [path for path in (tmp_path / "run").rglob(".tmp-*")]


def test_a_resized_save_does_not_mix_with_an_unfinished_one(storage: Storage) -> None:
    """Markers of two numbers of ranks in one folder never add up to a complete checkpoint."""
    tensors = island()
    name = save(storage, tensors, world_size=2, number=1)
    storage.delete(f"{name}/00000-of-00002.json")
    save(storage, tensors, world_size=3, number=1)
    assert find_island(storage, PREFIX).name == name
    assert torch.equal(
        load_island(storage, name, placement(tensors, 0, 1)).tensors["rounded"], tensors["rounded"]
    )


def test_nothing_is_left_unfilled(storage: Storage) -> None:
    """A tensor or a row that the checkpoint lacks, or one that nobody asked for, is an error by name."""
    tensors = island()
    name = save(storage, tensors)
    more = {**tensors, "exp_avg_sq/new": torch.zeros(3)}
    with pytest.raises(IntegrityError, match="exp_avg_sq/new"):
        load_island(storage, name, placement(more, 0, 1))
    fewer = {key: value for key, value in tensors.items() if key != "exp_avg/norm"}
    with pytest.raises(IntegrityError, match=r"unknown \['exp_avg/norm'\]"):
        load_island(storage, name, placement(fewer, 0, 1))
    other = {**tensors, "exp_avg/norm": torch.zeros(6)}
    with pytest.raises(
        IntegrityError, match=r"exp_avg/norm: a tensor has another shape \(saw: \[5\], expected \[6\]"
    ):
        load_island(storage, name, placement(other, 0, 1))


def test_rows_that_no_rank_wrote_are_named(storage: Storage) -> None:
    """If the ranks together did not write every row, loading says which are missing."""
    tensors = island()
    for rank in range(2):
        rows = cut(tensors, rank, 2)
        if rank == 1:
            del rows["parameters/embedding"]
        name = save_island(
            storage, PREFIX, rank=rank, world_size=2, generation=1, number=1, step=1, rows=rows, meta={}
        )
    with pytest.raises(
        IntegrityError, match=r"embedding: rows are missing \(saw: \[\(0, 4\)\], wanted 0 to 7"
    ):
        load_island(storage, name, placement(tensors, 0, 1))


def test_damage_after_the_choice_is_an_error(storage: Storage) -> None:
    """Each rank checks what it reads itself, too."""
    tensors = island()
    name = save(storage, tensors)
    file = f"{name}/00001-of-00002.safetensors"
    storage.write(file, storage.read(file)[:-1] + b"\0")
    with pytest.raises(IntegrityError, match="00001-of-00002"):
        load_island(storage, name, placement(tensors, 1, 2))
    load_island(storage, name, placement(tensors, 0, 2))  # reads only rank 0's file


def test_a_planted_pickle_does_not_run(storage: Storage, tmp_path: Path) -> None:
    """Pickles in place of a marker or a tensor file, `.metadata` of torch included, are never executed."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    older = save(storage, island(1), number=1)
    newer = save(storage, island(2), number=2)
    storage.write(f"{newer}/.metadata", pickle.dumps(Trap()))
    assert find_island(storage, PREFIX).name == newer
    for file in ("00000-of-00002.json", "00000-of-00002.safetensors"):
        storage.write(f"{newer}/{file}", pickle.dumps(Trap()))
        assert find_island(storage, PREFIX).name == older
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("keep", [1, 2])
def test_exactly_the_newest_complete_ones_are_kept(storage: Storage, keep: int) -> None:
    """After retiring, `keep` complete checkpoints are there, and no file of the others."""
    names = [save(storage, island(n), number=n) for n in range(1, 6)]
    assert sorted(retire_islands(storage, PREFIX, keep)) == names[:-keep]
    assert {file.rpartition("/")[0] for file in storage.list(PREFIX)} == set(names[-keep:])
    assert retire_islands(storage, PREFIX, keep) == []


def test_an_unfinished_newest_does_not_push_out_the_last_complete_one(storage: Storage) -> None:
    """With keep 1, the old checkpoint stays until the new one is complete."""
    older = save(storage, island(1), number=1)
    rows = cut(island(2), 0, 2)
    save_island(storage, PREFIX, rank=0, world_size=2, generation=1, number=2, step=200, rows=rows, meta={})
    assert retire_islands(storage, PREFIX, 1) == []
    assert find_island(storage, PREFIX).name == older
    newest = save(storage, island(2), number=3)
    assert len(retire_islands(storage, PREFIX, 1)) == 2
    assert find_island(storage, PREFIX).name == newest


def test_a_kill_while_retiring_leaves_no_bad_checkpoint(tmp_path: Path) -> None:
    """Whatever number of deletions happened, the newest stays usable and nothing is called damaged."""
    storage = Storage(tmp_path / "run")
    for deletions in range(4):
        save(storage, island(1), number=1)
        newest = save(storage, island(2), number=2)
        left = [deletions]

        class Killed(BaseException):
            pass

        class Fragile(Storage):
            def delete(self, name, left=left, killed=Killed):
                if not left[0]:
                    raise killed
                left[0] -= 1
                super().delete(name)

        with pytest.raises(Killed):
            retire_islands(Fragile(tmp_path / "run"), PREFIX, 1)
        found = find_island(storage, PREFIX)
        assert (found.name, found.skipped) == (newest, [])
        retire_islands(storage, PREFIX, 1)
        assert len(storage.list(PREFIX)) == 4
