"""Ctrl-C and SIGTERM become a wish that the controller reads, instead of an exception anywhere."""

from __future__ import annotations

import signal
from types import FrameType

from elastic.base.errors import EXIT_SIGINT, EXIT_SIGTERM

_WATCHED = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}


class Interrupted(Exception):
    """A stop signal came while the run was starting. Not an error: somebody wants it to end."""


class StopSignals:
    """Remembers the first stop signal; a second one ends at once with KeyboardInterrupt."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.installed = False

    def install(self) -> None:
        """Take over both signals. Works in the main thread only, as Python demands."""
        self.installed = True
        for number in _WATCHED:
            signal.signal(number, self._note)

    def check(self) -> None:
        """Raise Interrupted if a signal has come: called wherever starting a run takes long."""
        if self.received is not None:
            raise Interrupted(self.received.name)

    @property
    def exit_code(self) -> int:
        """130 or 143, as shells expect; 0 when nothing came."""
        return _WATCHED[self.received] if self.received else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
