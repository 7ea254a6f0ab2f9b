"""What the synchronizer tells: its events, kept for the controller, and the accounts of time and cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from elastic.base.events import EventSink, make_event
from elastic.exchange.link import Beat, Hello, Member
from elastic.policy.cost import accrue
from elastic.runtime.board import Board
from elastic.runtime.versions import library_versions

PROGRESS_EVERY_S = 5.0


class Recorder:
    """Emits events to the run folder's log and keeps the newest for the controller to fetch."""

    def __init__(self, board: Board, events: EventSink) -> None:
        self._board, self._events = board, events
        self._number = 0
        self._told: dict[str, float] = {}
        self.versions = library_versions()

    def emit(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One fact, to the log and to the controller."""
        self._events.emit(kind, fields)
        self.show(kind, fields)

    def show(self, kind: str, fields: Mapping[str, Any]) -> None:
        """To the controller only: the island writes this fact into its own log."""
        self._number += 1
        event = make_event(kind, "synchronizer", self._number, time.time(), fields)
        self._board.events.append((self._number, event))

    def since(self, cursor: int) -> tuple[int, list[dict[str, Any]]]:
        """Kept events after `cursor`, and the next cursor."""
        return self._number, [event for number, event in self._board.events if number > cursor]

    # ------------------------------------------------------------------------------------ facts

    def warn(self, what: str) -> None:
        """Something deserves a look."""
        self.emit("warning", {"what": what})

    def lost(self, island: str, reason: str, returned: int) -> None:
        """An island stopped answering."""
        generation = self._board.membership.generations.get(island, 0)
        self.emit(
            "island_lost",
            {"island": island, "generation": generation, "reason": reason, "returned_sequences": returned},
        )

    def entered(self, member: Member, hello: Hello, digest: str) -> None:
        """An island was let in; it writes this fact itself once it has checked what it received."""
        self.show(
            "island_joined",
            {
                "island": member.island,
                "generation": member.generation,
                "workers": hello.workers,
                "device": hello.device,
                "version": self._board.version,
                "digest": digest,
                "resumed_step": hello.step,
            },
        )

    def left(self, member: Member, reason: str) -> None:
        """An island ended in order."""
        self.emit("island_left", {"island": member.island, "generation": member.generation, "reason": reason})

    def refused(self, member: Member, contribution: str, reason: str) -> None:
        """A contribution was refused by name."""
        self.emit(
            "refused",
            {"island": member.island, "generation": member.generation, "id": contribution, "reason": reason},
        )

    def progress(self, member: Member, beat: Beat, now: float) -> None:
        """What an island says of itself; every beat for the live table, now and then as an event."""
        self._board.beats[member.island] = beat
        if now - self._told.get(member.island, -PROGRESS_EVERY_S) < PROGRESS_EVERY_S or not beat.step:
            return
        self._told[member.island] = now
        fields = {"island": member.island, "generation": member.generation}
        fields |= {
            "step": beat.step,
            "loss": beat.loss,
            "lr": beat.lr,
            "grad_norm": beat.grad_norm,
            "tokens": beat.tokens,
            "tokens_per_s": beat.tokens_per_s,
            "stall_s": beat.stall_s,
            "phase": beat.phase,
        }
        self.emit("island_progress", fields)

    # --------------------------------------------------------------------------------- accounts

    def account(self, elapsed_s: float, counters: dict[str, float]) -> None:
        """Add the time that passed, and what the workers of joined islands cost meanwhile."""
        counters["wall_s"] += elapsed_s
        board = self._board
        seconds = {name: board.workers.get(name, 0) * elapsed_s for name in board.membership.members}
        counters["cost"] += accrue(seconds, board.setup.prices)
