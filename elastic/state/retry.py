"""Storage calls with patience: back-off, a deadline, a count, and an error that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from elastic.base.errors import ElasticError, RunFolderError, StorageError
from elastic.state.trouble import fix_for, is_refusal, may_pass

T = TypeVar("T")
OnRetry = Callable[[str, str, BaseException, float], None]


@dataclass(frozen=True)
class Retry:
    """How long trouble is waited out. Waits double from the first to the longest."""

    first_wait_s: float = 0.2
    longest_wait_s: float = 15.0
    deadline_s: float = 180.0
    first_deadline_s: float = 20.0
    """The deadline until the folder has been usable once: a wrong address should not take minutes."""


class Patience:
    """Carries out calls on the folder `url`. `count` is the number of retries so far."""

    def __init__(
        self, url: str, retry: Retry, sleep: Callable[[float], None], on_retry: OnRetry | None
    ) -> None:
        self.url, self.retry, self.on_retry = url, retry, on_retry
        self.count = 0
        self.usable = False
        self._sleep = sleep

    def call(self, verb: str, name: str, once: Callable[[], T]) -> T:
        """The result of `once`.

        FileNotFoundError, FileExistsError, and whatever is not storage trouble pass unchanged. Trouble
        that stays is a RunFolderError until the folder has been usable, a StorageError afterwards.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_pass),
            wait=tenacity.wait_exponential(self.retry.first_wait_s, self.retry.longest_wait_s),
            stop=self._deadline_reached,
            sleep=self._sleep,
            before_sleep=lambda state: self._note(verb, name, state),
            reraise=True,
        )
        try:
            return retrying(once)
        except Exception as error:
            translated = self._translate(verb, name, error)
            if translated is None:
                raise
            raise translated from error

    @property
    def _deadline_s(self) -> float:
        longest = self.retry.deadline_s
        return longest if self.usable else min(self.retry.first_deadline_s, longest)

    def _deadline_reached(self, state: tenacity.RetryCallState) -> bool:
        return max(state.idle_for, state.seconds_since_start or 0.0) >= self._deadline_s

    def _note(self, verb: str, name: str, state: tenacity.RetryCallState) -> None:
        self.count += 1
        error = state.outcome.exception() if state.outcome else None
        if self.on_retry is not None and error is not None:
            self.on_retry(verb, name, error, state.next_action.sleep if state.next_action else 0.0)

    def _translate(self, verb: str, name: str, error: Exception) -> ElasticError | None:
        where = f"{self.url.rstrip('/')}/{name}"
        saw = f"{type(error).__name__}: {error}"
        kind = StorageError if self.usable else RunFolderError
        if is_refusal(error):
            return kind(f"cannot {verb} in the run folder", where=where, saw=saw, fix=fix_for(error))
        if isinstance(error, FileNotFoundError) and verb in ("write", "create"):
            return kind("the bucket or the disk is not there", where=where, saw=saw, fix="create the bucket")
        if may_pass(error):
            return StorageError(
                f"could not {verb} for {self._deadline_s:g} s",
                where=where,
                saw=saw,
                fix="check the network and the free space; then the same command continues the run",
            )
        return None
