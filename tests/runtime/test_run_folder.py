"""The run folder: where it may lie, whose it is, and which jobs may continue it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.base.config import Fleet
from elastic.base.errors import LockHeldError, RunFolderError
from elastic.runtime.run_folder import LockKeeper, identify, open_storage, refuse_other_job
from elastic.state.lock import RunLock
from elastic.state.run_file import read_run
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit

CORPUS = {"manifest": "a" * 64, "vocab_size": 257, "seq_len": 16, "corpus": "b" * 16}


def _fleet(**cluster: Any) -> Fleet:
    islands = [{"name": "eu", "region": "eu"}, {"name": "us", "region": "us"}]
    return Fleet.model_validate({"islands": islands, "cluster": cluster or {"kind": "local"}})


def _changed(job: Any, section: str, **values: Any) -> Any:
    return job.model_copy(update={section: getattr(job, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("fleet", "in_ray_job", "where"),
    [
        (_fleet(kind="existing"), False, "on an existing cluster"),
        (_fleet(), True, "under a Ray job"),
    ],
)
def test_a_relative_folder_is_refused_where_it_would_be_lost(
    lab: Any, fleet: Fleet, in_ray_job: bool, where: str
) -> None:
    """The next submission would silently begin anew: exit code 2, and two ways out."""
    job = lab.job().model_copy(update={"run_folder": "runs/mine"})
    with pytest.raises(RunFolderError, match=where) as caught:
        open_storage(job, fleet, in_ray_job)
    assert caught.value.exit_code == 2
    assert "runs/mine" in str(caught.value)
    assert "s3://" in str(caught.value)
    assert not Path("runs/mine").exists()


def test_a_relative_folder_on_ones_own_machine_is_fine(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made absolute, so that every process means the same folder."""
    monkeypatch.chdir(tmp_path)
    job = lab.job().model_copy(update={"run_folder": "runs/mine"})
    assert open_storage(job, _fleet(), False).url == str(tmp_path / "runs/mine")


def test_a_run_keeps_its_name_and_says_what_it_is(lab: Any, tmp_path: Path) -> None:
    """The second life finds the first one's run, and run.json holds job, fleet, versions and corpus."""
    storage, job = Storage(tmp_path), lab.job()
    first = identify(storage, job, _fleet(), CORPUS)
    assert not first.continued
    assert first.run.startswith("small-")
    again = identify(storage, job, _fleet(), CORPUS)
    assert (again.run, again.continued) == (first.run, True)
    there = read_run(storage)
    assert there is not None
    assert there["job"] == job.model_dump(mode="json")
    assert there["fleet"]["islands"][1]["name"] == "us"
    assert {"torch", "elastic"} <= there["versions"].keys()
    assert there["manifest"] == CORPUS["manifest"]


def test_what_makes_it_another_run_is_refused_with_all_differences(lab: Any, tmp_path: Path) -> None:
    """Model, data, seed and batch are frozen: each difference is named with both values."""
    storage, job = Storage(tmp_path), lab.job()
    identify(storage, job, _fleet(), CORPUS)
    other = _changed(_changed(job, "model", d_model=32), "inner", batch_sequences=8)
    other = _changed(other, "data", text_column="body").model_copy(update={"seed": 5})
    with pytest.raises(RunFolderError) as caught:
        refuse_other_job(storage, other)
    text = str(caught.value)
    for difference in (
        "model.d_model: 16 in the run, 32 now",
        "inner.batch_sequences: 4 in the run, 8 now",
        'data.text_column: "text" in the run, "body" now',
        "seed: 0 in the run, 5 now",
    ):
        assert difference in text
    assert "init_from=OLD" in text
    there = read_run(storage)
    assert there is not None
    assert there["job"]["seed"] == 0  # the refusal changed nothing


def test_what_may_change_is_taken_over(lab: Any, tmp_path: Path) -> None:
    """Budget, rates, H, fleet, cache and logging may change; run.json says what holds now."""
    storage, job = Storage(tmp_path), lab.job()
    identify(storage, job, _fleet(), CORPUS)
    other = _changed(_changed(job, "budget", tokens=99_999), "inner", lr=0.5, micro_batch_sequences=1)
    other = _changed(_changed(other, "outer", sync_every=7), "data", cache_folder="/elsewhere")
    identify(storage, other, _fleet(kind="existing"), CORPUS)
    there = read_run(storage)
    assert there is not None
    assert (there["job"]["budget"]["tokens"], there["job"]["outer"]["sync_every"]) == (99_999, 7)
    assert there["fleet"]["cluster"]["kind"] == "existing"


def test_changed_sources_are_refused(lab: Any, tmp_path: Path) -> None:
    """The same job over other text is another run."""
    storage, job = Storage(tmp_path), lab.job()
    identify(storage, job, _fleet(), CORPUS)
    with pytest.raises(RunFolderError, match="data: manifest aaaaaaaaaaaa in the run, cccccccccccc now"):
        identify(storage, job, _fleet(), {**CORPUS, "manifest": "c" * 64})


def test_a_lock_is_held_and_let_go(tmp_path: Path) -> None:
    """While it is held nobody else can start; after `release` the next one starts at once."""
    storage = Storage(tmp_path)
    keeper = LockKeeper(storage)
    assert keeper.epoch == 1
    with pytest.raises(LockHeldError):
        LockKeeper(storage)
    keeper.release()
    after = LockKeeper(storage)
    assert (after.epoch, after.lost) == (2, "")
    after.release()


def test_a_lost_lock_is_noticed(tmp_path: Path, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another driver took over: the keeper says so, and its release leaves the other's lock alone."""
    monkeypatch.setattr("elastic.runtime.run_folder.BEAT_EVERY_S", 0.01)
    storage = Storage(tmp_path)
    keeper = LockKeeper(storage)
    storage.write("lock/000002.json", storage.read("lock/000001.json"))
    lab.until(lambda: keeper.lost)
    keeper.release()
    assert RunLock(storage)._highest() == 2
