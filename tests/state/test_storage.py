"""The run folder's files: whole or absent, first wins where it must, trouble waited out and named."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from elastic.base.errors import RunFolderError, StorageError
from elastic.state.process import ProcessIdentity, this_process
from elastic.state.storage import Retry, Storage, hash_file

pytestmark = pytest.mark.unit


class FaultyFileSystem(MemoryFileSystem):
    """A bucket in memory whose next calls fail as listed in `faults`."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012  as in the parent
    pseudo_dirs: list = [""]  # noqa: RUF012
    faults: list[BaseException] = []  # noqa: RUF012
    lose_reply: bool = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        """Fail as planned, before or (if the reply is lost) after the write."""
        fault = FaultyFileSystem.faults.pop(0) if FaultyFileSystem.faults else None
        if fault is None or FaultyFileSystem.lose_reply:
            super().pipe_file(path, value, mode=mode, **kwargs)
        if fault is not None:
            raise fault

    def cat_file(self, path, *args, **kwargs):
        """Fail as planned."""
        if FaultyFileSystem.faults:
            raise FaultyFileSystem.faults.pop(0)
        return super().cat_file(path, *args, **kwargs)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture(autouse=True)
def _empty_buckets() -> Iterator[None]:
    yield
    for kind in (MemoryFileSystem, FaultyFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]
    FaultyFileSystem.faults.clear()
    FaultyFileSystem.lose_reply = False


@pytest.fixture(params=["path", "file-url", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A run folder on each kind of place."""
    urls = {
        "path": str(tmp_path / "run"),
        "file-url": f"file://{tmp_path}/run",
        "memory": "memory://bucket/run",
    }
    return Storage(urls[request.param])


def faulty(**options) -> Storage:
    """A bucket that fails as planned, without waiting."""
    return Storage("faulty://bucket/run", sleep=lambda _: None, **options)


def files_of(storage: Storage) -> list[str]:
    """Everything that lies there, temporary files too."""
    if storage.is_local:
        root = Path(storage.url)
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    return storage.list()


def test_write_read_list_delete(storage: Storage) -> None:
    """What was written is read, listed by its relative name, replaced, and deleted."""
    assert storage.list() == []
    storage.write("a/b.json", b"1")
    storage.write("a/b.json", b"2")
    storage.write("top", b"")
    assert storage.read("a/b.json") == b"2"
    assert storage.read("top") == b""
    assert storage.list() == ["a/b.json", "top"]
    assert storage.list("a") == ["a/b.json"]
    assert storage.list("nowhere") == []
    assert (storage.exists("a/b.json"), storage.exists("a"), storage.exists("x/y")) == (True, False, False)
    storage.delete("a/b.json")
    storage.delete("a/b.json")
    assert storage.list() == ["top"]
    with pytest.raises(FileNotFoundError):
        storage.read("a/b.json")


def test_read_many_leaves_out_what_is_gone(storage: Storage) -> None:
    """Many files are read at once; one that vanished since the listing is left out."""
    for number in range(20):
        storage.write(f"d/{number}", str(number).encode())
    found = storage.read_many([*(f"d/{n}" for n in range(20)), "d/gone"])
    assert found == {f"d/{n}": str(n).encode() for n in range(20)}


def test_create_takes_a_free_name_only(storage: Storage) -> None:
    """A create-only write never replaces, and leaves nothing behind when it loses."""
    storage.create("lock/1", b"first")
    with pytest.raises(FileExistsError):
        storage.create("lock/1", b"second")
    assert storage.read("lock/1") == b"first"
    assert files_of(storage) == ["lock/1"]


def test_one_of_many_racing_creators_wins(storage: Storage) -> None:
    """Of threads that create the same name at once, exactly one succeeds, and its bytes are there."""
    barrier = threading.Barrier(8)
    won: list[bytes] = []
    lost: list[int] = []

    def race(number: int) -> None:
        barrier.wait()
        try:
            storage.create("race", f"{number}".encode())
        except FileExistsError:
            lost.append(number)
        else:
            won.append(f"{number}".encode())

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [storage.read("race")] == won
    assert len(lost) == 7


def test_a_failed_write_publishes_nothing(storage: Storage) -> None:
    """If writing raises in the middle, neither the final name nor a leftover appears."""

    def half(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise RuntimeError("the writer broke")

    storage.write("whole", b"old")
    for name in ("new", "whole"):
        with pytest.raises(RuntimeError, match="the writer broke"):
            storage.publish(name, half)
    assert files_of(storage) == ["whole"]
    assert storage.read("whole") == b"old"


def test_files_go_there_and_back_with_their_hash(storage: Storage, tmp_path: Path) -> None:
    """A local file is stored and fetched unchanged; both ways tell its sha256."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    expected = hash_file(source)
    assert storage.put_file(source, "x/file") == expected.sha256
    assert storage.hash("x/file") == expected
    assert storage.get_file("x/file", target) == expected.sha256
    assert target.read_bytes() == source.read_bytes()
    with storage.local_copy("x/file") as path:
        assert path.read_bytes() == source.read_bytes()
    with pytest.raises(FileNotFoundError):
        storage.get_file("x/nothing", tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["source", "target"]


def test_a_folder_name_with_glob_characters_is_literal(tmp_path: Path) -> None:
    """`[ ] ? *` in the folder's name neither hide its files nor show a neighbour's."""
    for url in (str(tmp_path / "run[1]*?"), "memory://bucket/run[1]*?"):
        mine, neighbour = Storage(url), Storage(url.replace("[1]*?", "1xx"))
        mine.write("state/a", b"mine")
        neighbour.write("state/b", b"other")
        assert mine.list() == ["state/a"]


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a//b", "a/./b", "a/../b", "a\nb"])
def test_names_stay_inside_the_folder(name: str, tmp_path: Path) -> None:
    """A name that could leave the run folder is refused before anything is touched."""
    storage = Storage(tmp_path / "run")
    with pytest.raises(ValueError, match="relative name"):
        storage.write(name, b"")
    assert not (tmp_path / "run").exists()


def test_a_path_is_made_absolute_and_a_copy_reaches_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path means the folder where the driver stood, in every process it is sent to."""
    monkeypatch.chdir(tmp_path)
    storage = Storage("runs/a")
    storage.write("x", b"1")
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.read("x") == b"1"
    assert copy.path("x") == tmp_path / "runs/a/x"


# ------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    "trouble", [ConnectionResetError("lost"), OSError(errno.EBUSY, "slow down"), TimeoutError("slow")]
)
def test_passing_trouble_is_retried_and_counted(trouble: BaseException) -> None:
    """Three failures in a row are waited out with growing waits, and each is reported."""
    heard: list[tuple[str, str, float]] = []
    storage = faulty(on_retry=lambda verb, name, error, wait_s: heard.append((verb, name, wait_s)))
    FaultyFileSystem.faults[:] = [trouble] * 3
    storage.write("a", b"1")
    FaultyFileSystem.faults[:] = [trouble]
    assert storage.read("a") == b"1"
    assert storage.retries == 4
    assert [(verb, name) for verb, name, _ in heard] == [("write", "a")] * 3 + [("read", "a")]
    waits = [wait for _, _, wait in heard[:3]]
    assert waits == sorted(waits)
    assert waits[0] < waits[2]


def test_trouble_that_stays_ends_resumable_at_the_deadline() -> None:
    """Unreachable storage is given up after the stated time, with exit code 75 and what to do."""
    storage = faulty(retry=Retry(deadline_s=100.0))
    storage.probe()
    FaultyFileSystem.faults[:] = [OSError(errno.EBUSY, "slow down")] * 1000
    with pytest.raises(StorageError) as failure:
        storage.write("a", b"1")
    assert failure.value.exit_code == 75
    text = str(failure.value)
    assert "100 s" in text
    assert "faulty://bucket/run/a" in text
    assert "slow down" in text
    assert "same command" in text
    assert 5 < 1000 - len(FaultyFileSystem.faults) < 50


def test_a_wrong_address_is_given_up_sooner_than_a_lost_one() -> None:
    """Until the folder has been usable once, the short deadline holds."""
    storage = faulty(retry=Retry(deadline_s=3600.0, first_deadline_s=1.0))
    FaultyFileSystem.faults[:] = [ConnectionRefusedError("no such host")] * 1000
    with pytest.raises(StorageError, match="for 1 s"):
        storage.probe()


def test_a_lost_reply_to_a_create_is_recognised() -> None:
    """If the write landed but its reply was lost, the retry sees its own bytes and is content."""
    storage = faulty()
    FaultyFileSystem.faults[:] = [ConnectionResetError("lost")]
    FaultyFileSystem.lose_reply = True
    storage.create("lock/1", b"mine")
    FaultyFileSystem.faults[:] = [ConnectionResetError("lost")]
    with pytest.raises(FileExistsError):
        storage.create("lock/1", b"somebody else's")


def test_programming_errors_are_not_retried() -> None:
    """Only storage trouble is waited out."""
    storage = faulty()
    FaultyFileSystem.faults[:] = [TypeError("a bug")]
    with pytest.raises(TypeError, match="a bug"):
        storage.write("a", b"1")
    assert storage.retries == 0


# --------------------------------------------------------------------------------------- probe


def test_probe_leaves_nothing_behind(storage: Storage) -> None:
    """A usable folder passes and stays empty."""
    storage.probe()
    assert files_of(storage) == []


def refuse(number: int) -> Callable:
    """A function that always fails with this errno."""

    def raise_it(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return raise_it


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "write access"),
        (errno.EROFS, "read-only; choose another"),
        (errno.EPERM, "write access"),
    ],
)
def test_an_unwritable_folder_is_refused_at_once(number: int, fix: str) -> None:
    """No permission and a read-only disk end in exit code 2 without a retry, and say what to change."""
    storage = faulty()
    FaultyFileSystem.faults[:] = [OSError(number, os.strerror(number))]
    with pytest.raises(RunFolderError) as failure:
        storage.probe()
    assert failure.value.exit_code == 2
    assert fix in str(failure.value)
    assert storage.retries == 0


def test_permission_lost_during_the_run_is_resumable() -> None:
    """Credentials that expire after a good probe end the run with exit code 75, not 2."""
    storage = faulty()
    storage.probe()
    FaultyFileSystem.faults[:] = [PermissionError("expired token")]
    with pytest.raises(StorageError, match="expired token"):
        storage.write("a", b"1")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    """A run folder below a plain file is refused with that reason."""
    (tmp_path / "file").write_text("")
    for url in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunFolderError, match="a file is where a folder should be"):
            Storage(url).probe()


def test_a_disk_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount that cannot create-only is found by the probe, not by two drivers on one run."""
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    with pytest.raises(RunFolderError, match="no hard links"):
        Storage(tmp_path / "run").probe()


def test_a_link_whose_reply_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may link and then say the name is taken; the link count tells the truth."""
    link = os.link

    def link_and_lose_the_reply(source, target):
        link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", link_and_lose_the_reply)
    storage = Storage(tmp_path / "run")
    storage.create("a", b"1")
    assert storage.read("a") == b"1"


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    """A node that does not see the driver's file says so, and how to share the folder."""
    storage = Storage(tmp_path / "run")
    with pytest.raises(RunFolderError, match="shared file system or in a bucket"):
        storage.probe(must_see="run.json")
    storage.write("run.json", b"{}")
    storage.probe(must_see="run.json")


def test_a_store_that_ignores_create_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An S3 clone that overwrites on a conditional write could not hold a lock."""
    monkeypatch.setattr(
        FaultyFileSystem,
        "pipe_file",
        lambda self, path, value, mode="overwrite": self.store.update({path: value}),
    )
    monkeypatch.setattr(FaultyFileSystem, "cat_file", lambda self, path: self.store[path])
    with pytest.raises(RunFolderError, match="conditional writes"):
        faulty().probe()
    FaultyFileSystem.store.clear()


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3:// without its package says which extra to install; local paths need no such package."""
    for module in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, module, None)
    for url, extra in (("s3://bucket/run", "s3"), ("gs://bucket/run", "gcs")):
        with pytest.raises(RunFolderError, match=rf"pip install 'elastic-islands\[{extra}\]'"):
            Storage(url).probe()


@pytest.mark.parametrize(
    "url", ["", " ", "s3://", "nonsense://x/y", "ftp://host/x", "simplecache::memory://x"]
)
def test_an_unusable_address_is_refused(url: str) -> None:
    """Empty, unknown and unsuitable addresses are exit code 2 with an example of a right one."""
    with pytest.raises(RunFolderError, match="s3://"):
        Storage(url).probe()


def test_options_reach_every_operation() -> None:
    """One file system, opened once with the options, serves all calls."""
    seen: list[dict] = []

    class WithOptions(FaultyFileSystem):
        protocol = "withoptions"
        cachable = False

        def __init__(self, *args, **options) -> None:
            seen.append(options)
            super().__init__(*args, **options)

    fsspec.register_implementation("withoptions", WithOptions, clobber=True)
    storage = Storage("withoptions://bucket/run", {"endpoint_url": "http://here"})
    storage.write("a", b"1")
    storage.read("a")
    storage.list()
    storage.delete("a")
    assert seen == [{"endpoint_url": "http://here"}]
    copy = pickle.loads(pickle.dumps(storage))
    copy.list()
    assert seen == [{"endpoint_url": "http://here"}] * 2


# ----------------------------------------------------------------------------------- leftovers


def test_leftovers_of_dead_processes_are_hidden_and_cleaned(tmp_path: Path) -> None:
    """What a killed writer left is never listed and is removed later; a living writer's file stays."""
    from elastic.state import local_files

    storage = Storage(tmp_path)
    storage.write("d/a", b"1")
    me = this_process()
    tag = local_files._tag(me.machine)
    dead = tmp_path / "d" / f".tmp-{tag}-{me.pid}-1-aaaa"  # our id, but another start: reused
    alive = tmp_path / "d" / f".tmp-{tag}-{me.pid}-{me.start}-bbbb"
    elsewhere = tmp_path / "d" / f".tmp-0000-{me.pid}-1-cccc"
    for path in (dead, alive, elsewhere):
        path.write_bytes(b"half")
    assert storage.list() == ["d/a"]
    assert storage.clean_leftovers() == 1
    assert [path.exists() for path in (dead, alive, elsewhere)] == [False, True, True]


def test_a_process_is_dead_only_if_that_is_sure() -> None:
    """Another machine, or a living process, is never called dead; a reused or free id is."""
    me = this_process()
    assert not me.surely_dead()
    assert not ProcessIdentity(me.host, "elsewhere", 2**22 + 1, "1").surely_dead()
    assert ProcessIdentity(me.host, me.machine, 2**22 + 1, "1").surely_dead()
    assert ProcessIdentity(me.host, me.machine, me.pid, "1").surely_dead()
    assert ProcessIdentity.from_json(me.to_json()) == me
