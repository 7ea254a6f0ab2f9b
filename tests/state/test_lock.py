"""The run lock: who may take over, when, and that never two drivers hold one epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.base.errors import LockHeldError
from elastic.state.layout import beat_name, lock_name
from elastic.state.lock import RunLock
from elastic.state.process import ProcessIdentity, this_process
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit

ELSEWHERE = ProcessIdentity("far-host", "far-machine", 4242, "7")


class Time:
    """A clock that only sleeping moves; `during` runs in each sleep."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.now = 1000.0
        self.during = during

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """An empty run folder."""
    return Storage(tmp_path / "run")


def lock(
    storage: Storage, time: Time | None = None, identity: ProcessIdentity | None = None, **more
) -> RunLock:
    """A lock with a fake clock."""
    time = time or Time()
    return RunLock(storage, identity, time.clock, time.sleep, **more)


def test_epochs_rise_by_one_from_one(storage: Storage) -> None:
    """The first driver gets epoch 1; each later one the next, at once after a release."""
    time = Time()
    for expected in (1, 2, 3):
        mine = lock(storage, time)
        assert mine.acquire(30.0) == expected
        assert mine.still_mine(now=True)
        mine.release()
    assert time.now == 1000.0


def test_a_living_holder_is_left_alone(storage: Storage) -> None:
    """While the holder's counter moves, another driver is refused, told whom to look for and what to do."""
    holder = lock(storage, identity=ELSEWHERE, attempt="2026-01-05 10:00")
    holder.acquire()
    other = lock(storage, Time(during=holder.beat))
    with pytest.raises(LockHeldError) as failure:
        other.acquire(30.0)
    assert failure.value.exit_code == 75
    text = str(failure.value)
    for part in ("far-host", "4242", "2026-01-05 10:00", "epoch 1", "another run_folder"):
        assert part in text
    assert holder.still_mine(now=True)


def test_a_silent_holder_is_replaced_after_the_stated_time(storage: Storage) -> None:
    """A counter that stands still for `takeover_s` on the observer's own clock ends the holder's epoch."""
    holder = lock(storage, identity=ELSEWHERE)
    holder.acquire()
    time = Time()
    assert lock(storage, time).acquire(30.0) == 2
    assert 1030.0 <= time.now < 1033.0
    assert not holder.still_mine(now=True)
    with pytest.raises(LockHeldError, match="took the run over"):
        holder.require()


def test_a_holder_that_never_beat_is_replaced_too(storage: Storage) -> None:
    """A driver that died between winning the lock and its first beat does not block the run."""
    lock(storage, identity=ELSEWHERE).acquire()
    storage.delete(beat_name(1))
    assert lock(storage).acquire(30.0) == 2


def test_an_unreadable_lock_file_does_not_block_the_run(storage: Storage) -> None:
    """Garbage in the newest lock file counts as a silent, unknown holder."""
    lock(storage, identity=ELSEWHERE).acquire()
    storage.write(lock_name(1), b"\x80garbage")
    storage.write(beat_name(1), b"\x80garbage")
    time = Time()
    assert lock(storage, time).acquire(30.0) == 2
    assert time.now >= 1030.0


def test_a_dead_process_of_this_machine_is_replaced_at_once(storage: Storage) -> None:
    """On the same machine a free id, or an id used again by another process, needs no waiting."""
    me = this_process()
    time = Time()
    for dead in (
        ProcessIdentity(me.host, me.machine, 2**22 + 1, "1"),
        ProcessIdentity(me.host, me.machine, me.pid, "1"),
    ):
        lock(storage, identity=dead).acquire()
        lock(storage, time).acquire(30.0)
        storage.write(beat_name(2), b'{"released":true}')
        for name in storage.list("lock"):
            storage.delete(name)
    assert time.now == 1000.0


def test_a_living_process_of_this_machine_is_watched_like_any_other(storage: Storage) -> None:
    """A holder whose process exists here is not taken for dead."""
    lock(storage, identity=this_process()).acquire()
    time = Time()
    lock(storage, time).acquire(30.0)
    assert time.now >= 1030.0


def test_a_release_while_waiting_lets_the_next_in(storage: Storage) -> None:
    """A holder that ends in order during the wait frees the lock before `takeover_s`."""
    holder = lock(storage, identity=ELSEWHERE)
    holder.acquire()
    time = Time(during=holder.release)
    assert lock(storage, time).acquire(30.0) == 2
    assert time.now < 1005.0


def test_a_late_beat_does_not_undo_a_release(storage: Storage) -> None:
    """A beating thread that comes after the release changes nothing."""
    holder = lock(storage, identity=ELSEWHERE)
    holder.acquire()
    holder.release()
    holder.beat()
    holder.release()
    time = Time()
    assert lock(storage, time).acquire(30.0) == 2
    assert time.now == 1000.0


def test_of_two_drivers_waiting_for_the_same_lock_one_wins(storage: Storage) -> None:
    """Both see the same silent holder; the create-only write decides, and the loser is told."""
    lock(storage, identity=ELSEWHERE).acquire()
    first = lock(storage)

    def overtake() -> None:
        if first.epoch is None and time.now >= 1030.0:
            first.acquire(0.0)

    time = Time(during=overtake)
    second = lock(storage, time)
    with pytest.raises(LockHeldError, match="just won"):
        second.acquire(30.0)
    assert first.epoch == 2
    assert second.epoch is None


def test_of_many_racing_drivers_exactly_one_wins(storage: Storage) -> None:
    """Threads that acquire at the same moment: one epoch, one winner."""
    barrier = threading.Barrier(6)
    won: list[int] = []
    refused: list[str] = []

    def race() -> None:
        mine = RunLock(storage, ELSEWHERE, Time().clock, lambda _: None)
        barrier.wait()
        try:
            won.append(mine.acquire(1e9))
        except LockHeldError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert won == [1]
    assert len(refused) == 5


def test_still_mine_looks_at_a_bounded_rate(storage: Storage) -> None:
    """Between two looks nothing is listed; once lost, a lock stays lost."""
    time = Time()
    holder = lock(storage, time, ELSEWHERE, check_every_s=2.0)
    holder.acquire()
    lock(storage).acquire(30.0)
    looks: list[str] = []
    listing = storage.list
    storage.list = lambda folder="": looks.append(folder) or listing(folder)  # type: ignore[method-assign]
    assert holder.still_mine()
    assert looks == []
    time.now += 2.0
    assert not holder.still_mine()
    assert not holder.still_mine(now=True)
    assert looks == ["lock"]


def test_a_lock_is_acquired_once_and_used_while_held(storage: Storage) -> None:
    """Using a lock that was never won is a bug and says so."""
    mine = lock(storage)
    mine.release()
    with pytest.raises(ValueError, match="not held"):
        mine.beat()
    mine.acquire()
    with pytest.raises(ValueError, match="already holds epoch 1"):
        mine.acquire()
