"""The heartbeat of an island: a thread of rank 0 that tells the synchronizer it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.exchange.link import Beat, Command, Link, Member

BEAT_EVERY_S = 1.0


class Heart:
    """Beats until stopped; keeps the last command, and the first error, for the loop to read.

    Beats have their own thread so that a long step, a save or a transfer does not look like death.
    """

    def __init__(
        self,
        link: Link,
        member: Callable[[], Member | None],
        beat: Callable[[], Beat],
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        self._link, self._member, self._beat, self._every_s = link, member, beat, every_s
        self._over = threading.Event()
        self._error: Exception | None = None
        self._command = Command()
        self._thread = threading.Thread(target=self._run, name="elastic-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    @property
    def stop_asked(self) -> bool:
        """The synchronizer wants the island to save itself and end. Raises what a beat raised."""
        if self._error is not None:
            raise self._error
        return self._command.stop

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            member = self._member()
            if member is None:
                continue
            try:
                self._command = self._link.beat(member, self._beat())
            except Exception as error:  # kept for the loop, which raises it at its next look
                self._error = error
                return

    def end(self) -> None:
        """Stop beating; returns when the thread has ended or after its deadline."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._every_s + 5.0)
