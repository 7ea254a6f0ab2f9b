"""What to do when an island's fit ends: go on, start again (when?), or stop the run.

Preemption is weather, failure is a bug. An island that is preempted starts again as often as it
takes. One that is lost or fails starts again after a growing pause, as long as it gets somewhere
between two endings. The same error twice without progress is a bug of the code, and stops the run.

`decide` takes the state of one island and how it ended, and returns the next state and a decision.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Literal

from elastic.base.errors import EXIT_BUG, EXIT_CANNOT_FIT, EXIT_CONFIG, EXIT_RESUMABLE

NEVER_RETRIED = (EXIT_CONFIG, EXIT_CANNOT_FIT)


@dataclass(frozen=True)
class Restart:
    """Start the island again after `delay_s`."""

    delay_s: float
    reason: str


@dataclass(frozen=True)
class Stop:
    """End the run with this exit code."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Done:
    """The island has nothing left to do."""


Decision = Restart | Stop | Done


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one incarnation of an island ended.

    `finished`: in order. `preempted`: its nodes were taken away. `lost`: a process, a node or a
    connection died. `error`: Python code raised; `traceback` is its text, and `exit_code` that of
    the error if it was one of `elastic.base.errors`.
    """

    kind: Literal["finished", "preempted", "lost", "error"]
    version: int
    """Newest durable version with a contribution of this island. (Not the newest of all: the others go
    on while this island fails in a loop.)"""
    step: int
    """The island's own step."""
    what: str = ""
    """One line for people."""
    traceback: str = ""
    exit_code: int = EXIT_BUG


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is remembered of an island between two endings."""

    failures: int = 0
    """Losses and errors in a row without progress."""
    preemptions: int = 0
    """Preemptions in a row without progress."""
    version: int = -1
    step: int = -1
    fingerprint: str = ""
    """Of the last error without progress since."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits. The pause doubles from `first_delay_s` to at most `max_delay_s`."""

    max_failures: int = 3
    """Losses and errors in a row without progress, after which the run stops, resumable."""
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0

    def delay_s(self, times: int) -> float:
        """Pause before the `times`-th start in a row without progress."""
        return min(self.first_delay_s * 2.0 ** min(times - 1, 30), self.max_delay_s)


def decide(island: str, record: Record, ending: Ending, rules: Rules = Rules()) -> tuple[Record, Decision]:
    """The next record of the island and what to do.

    Progress means that the island's step, or the version it last contributed to, is further than at
    any ending before; it sets all counts back to zero.
    """
    if ending.kind == "finished":
        return record, Done()
    if ending.version > record.version or ending.step > record.step:
        record = Record(version=max(ending.version, record.version), step=max(ending.step, record.step))
    if ending.kind == "preempted":
        record = replace(record, preemptions=record.preemptions + 1)
        why = (
            f"island {island} was preempted: {ending.what}"
            if ending.what
            else f"island {island} was preempted"
        )
        return record, Restart(rules.delay_s(record.preemptions), why)

    what = ending.what or (_last_line(ending.traceback) if ending.traceback else ending.kind)
    if ending.kind == "error" and ending.exit_code in NEVER_RETRIED:
        return record, Stop(ending.exit_code, f"island {island}: {what}")
    seen, fingerprint = record.fingerprint, record.fingerprint
    if ending.kind == "error" and ending.exit_code != EXIT_RESUMABLE:
        fingerprint = fingerprint_of(ending.traceback or what)
        if fingerprint == seen:
            reason = f"island {island} failed twice in the same way without progress: {what}"
            return record, Stop(EXIT_BUG, "\n".join(part for part in (reason, ending.traceback) if part))
    record = replace(record, failures=record.failures + 1, fingerprint=fingerprint)
    if record.failures > rules.max_failures:
        reason = (
            f"island {island} ended {record.failures} times in a row without progress; the last time: {what}"
        )
        return record, Stop(EXIT_RESUMABLE, reason)
    return record, Restart(rules.delay_s(record.failures), f"island {island}: {what}")


def fingerprint_of(traceback: str) -> str:
    """Equal for two tracebacks of the same fault: numbers and addresses in the message do not count.

    The places in the code do, with their line numbers.
    """
    lines = [line.strip() for line in traceback.strip().splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    rest = [_NUMBER.sub("#", line) for line in lines if not line.startswith("File ")]
    return hashlib.sha256("\n".join(places + rest).encode()).hexdigest()


_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{16,}\b|\d+")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()
