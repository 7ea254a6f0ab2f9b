"""The run lock: one driver writes a run, and a driver that lost it can only write where nobody reads.

The lock is a rising number, the *epoch*, won by the create-only write of `lock/<epoch>.json`. The
holder raises a counter in `lock/<epoch>.beat`. Another driver takes over by winning the next epoch,
and only if the holder said it is done, or is surely dead (same machine), or has not moved its counter
for `takeover_s` on the *other driver's own* monotonic clock. No clock of two hosts is ever compared.
Whatever a driver writes carries its epoch (`layout`, `records`), so a late writer harms nothing.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from elastic.base.errors import IntegrityError, LockHeldError
from elastic.state.canonical import seal, unseal
from elastic.state.layout import LOCK, beat_name, lock_name, parse_lock_name
from elastic.state.process import ProcessIdentity, this_process
from elastic.state.storage import Storage


class RunLock:
    """The lock of one run folder, for one attempt.

    `attempt` is said to others who find the lock held. The caller calls `beat` several times per
    `takeover_s` of other drivers, from a thread of its own, and stops writing when `still_mine` says no.
    """

    def __init__(
        self,
        storage: Storage,
        identity: ProcessIdentity | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        attempt: str = "",
        check_every_s: float = 2.0,
    ) -> None:
        self.storage = storage
        self.identity = identity or this_process()
        self.attempt = attempt
        self.epoch: int | None = None
        self._clock, self._sleep = clock, sleep
        self._check_every_s = check_every_s
        self._checked_at = 0.0
        self._lost = False
        self._released = False
        self._counter = 0
        self._writing = threading.Lock()  # a late beat must not follow the release

    def acquire(self, takeover_s: float = 30.0) -> int:
        """Win the next epoch and return it; waits at most `takeover_s` (and one look) for a silent holder.

        Temporary files that killed processes of this machine left are removed. Raises LockHeldError as
        soon as the holder is seen to be alive, or if another driver wins.
        """
        if self.epoch is not None:
            raise ValueError(f"this lock already holds epoch {self.epoch}")
        holder = self._highest()
        if holder:
            self._wait_until_free(holder, takeover_s)
        epoch = holder + 1
        fields = {"holder": self.identity.to_json(), "attempt": self.attempt, "token": secrets.token_hex(16)}
        data, _ = seal({"epoch": epoch, **fields}, where=lock_name(epoch))
        try:
            self.storage.create(lock_name(epoch), data)
        except FileExistsError as error:
            raise self._held_error(epoch, "it has just won the lock") from error
        self.epoch = epoch
        self._checked_at = self._clock()
        self.beat()
        self.storage.clean_leftovers()
        return epoch

    def beat(self) -> None:
        """Show others that this driver lives; after `release` it does nothing."""
        with self._writing:
            if not self._released:
                self._counter += 1
                self._write_beat(self._held_epoch(), released=False)

    def still_mine(self, *, now: bool = False) -> bool:
        """False from the moment a higher epoch is seen; looks at most every `check_every_s`, or `now`."""
        epoch = self._held_epoch()
        if not self._lost and (now or self._clock() - self._checked_at >= self._check_every_s):
            self._lost = self._highest() > epoch
            self._checked_at = self._clock()
        return not self._lost

    def require(self, *, now: bool = False) -> None:
        """Raise LockHeldError if the lock is no longer ours."""
        if not self.still_mine(now=now):
            raise self._held_error(self._highest(), "it took the run over")

    def release(self) -> None:
        """Let the next driver in at once. Calling it again, or without a lock, does nothing."""
        with self._writing:
            if self.epoch is not None and not self._released:
                self._released = True
                self._write_beat(self.epoch, released=True)

    # ------------------------------------------------------------------------------------ plumbing

    def _held_epoch(self) -> int:
        if self.epoch is None:
            raise ValueError("the run lock is not held")
        return self.epoch

    def _write_beat(self, epoch: int, *, released: bool) -> None:
        data = json.dumps({"counter": self._counter, "released": released}).encode()
        self.storage.write(beat_name(epoch), data)

    def _highest(self) -> int:
        epochs = (parse_lock_name(name) for name in self.storage.list(LOCK))
        return max((epoch for epoch in epochs if epoch is not None), default=0)

    def _wait_until_free(self, epoch: int, takeover_s: float) -> None:
        """Return once the holder of `epoch` is gone; raise LockHeldError once it is seen to live."""
        holder = self._holder(epoch)
        first = self._read_beat(epoch)
        if first.get("released") or (holder is not None and holder.surely_dead()):
            return
        start = self._clock()
        while self._clock() - start < takeover_s:
            self._sleep(min(1.0, takeover_s / 20))
            beat = self._read_beat(epoch)
            if beat.get("released"):
                return
            if beat != first:
                raise self._held_error(epoch, "it is alive")
            if self._highest() > epoch:
                raise self._held_error(self._highest(), "it has just won the lock")

    def _holder(self, epoch: int) -> ProcessIdentity | None:
        """Who won the epoch; None if the file cannot be understood."""
        try:
            fields = unseal(self.storage.read(lock_name(epoch)), where=lock_name(epoch))
            return ProcessIdentity.from_json(fields["holder"])
        except (IntegrityError, FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def _read_beat(self, epoch: int) -> dict[str, Any]:
        """The last beat; an absent or unreadable one equals itself, so it counts as standing still."""
        try:
            beat = json.loads(self.storage.read(beat_name(epoch)))
        except (FileNotFoundError, ValueError):
            return {}
        return beat if isinstance(beat, dict) else {}

    def _held_error(self, epoch: int, why: str) -> LockHeldError:
        holder = self._holder(epoch)
        who = f"process {holder.pid} on {holder.host}" if holder else "an unknown process"
        try:
            attempt = unseal(self.storage.read(lock_name(epoch)), where="")["attempt"]
        except (IntegrityError, FileNotFoundError, KeyError):
            attempt = ""
        return LockHeldError(
            f"another driver holds this run: {why}",
            where=self.storage.url,
            saw=f"{who}, epoch {epoch}" + (f", attempt {attempt}" if attempt else ""),
            fix="wait for it, or end it and run the same command again; or choose another run_folder",
        )
