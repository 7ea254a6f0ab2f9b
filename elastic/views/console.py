"""What a person sees while a run goes on: one live table on a terminal, else one line per fact.

Both renderers take events by `show` (they are listeners of an `EventLog`) and write to a stream that
the command line hands in. Off a terminal the number of lines is bounded: a repeating kind gets at most
one line per interval for the whole run, however many islands there are.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic.views.describe import RATE_BOUND, describe, outer_text, preparing_text, progress_text
from elastic.views.event_log import Event
from elastic.views.format import bytes_text, count_text, duration_text, loss_text, number, one_line
from elastic.views.progress import IslandProgress, Progress, TimeLeft

QUIET_S = 30.0
"""Without any event for this long a renderer says that it waits, and since what."""

_MOVES = ("island_progress", "outer_step", "data_progress")
"""Kinds that show in the progress line and have no line of their own."""


class Renderer(Protocol):
    """What the controller needs of a console, whichever it is."""

    def show(self, event: Event) -> None:
        """Take the next event, a dict as `elastic.base.events.make_event` builds it."""

    def close(self) -> None:
        """Show the last state and give the stream back."""


def open_console(stream: TextIO, every_s: float, *, terminal: bool) -> Renderer:
    """The renderer for a stream: a table if it is a terminal that can redraw, else lines."""
    if terminal:
        return LiveTable(stream)
    lines = Lines(stream, every_s)
    lines.tick_every(1.0)
    return lines


def stamp(wall_time: float, zone: tzinfo | None) -> str:
    """A wall clock time as time of day, in the local zone without `zone`."""
    return datetime.fromtimestamp(wall_time, zone).strftime("%H:%M:%S")


def _when(event: Event) -> float:
    return number(event["time"]) or 0.0


class _Quiet:
    """How long no event has come, measured on one monotonic clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s, self.last_wall = clock(), 0.0
        self.last = "the start"

    def heard(self, event: Event, text: str | None) -> None:
        self._last_s, self.last_wall = self._clock(), _when(event)
        self.last = text or f"{event['kind']} of {event.get('island', 'the run')}"

    @property
    def seconds(self) -> float:
        return self._clock() - self._last_s

    @property
    def text(self) -> str:
        return f"no event for {duration_text(self.seconds)}, the last was: {self.last}"


# ---------------------------------------------------------------------------------------- lines


class Lines:
    """One self-contained line per fact, flushed, without control characters.

    Progress of the whole run takes at most one line per `every_s` of `clock` (monotonic), and so does each
    sentence of the kinds in `describe.RATE_BOUND`; a held-back fact is counted on the next line like it.
    """

    def __init__(
        self,
        stream: TextIO,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        zone: tzinfo | None = None,
    ) -> None:
        self._stream, self._every_s, self._clock, self._zone = stream, every_s, clock, zone
        self._progress, self._left = Progress(), TimeLeft(clock)
        self._due_s: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._unshown: Event | None = None
        self._quiet = _Quiet(clock)
        self._lock = threading.Lock()
        self._over = threading.Event()

    def show(self, event: Event) -> None:
        """Take the next event; from any thread."""
        with self._lock:
            self._show(event)

    def tick_every(self, seconds: float) -> None:
        """Call `tick` from a thread of its own until `close`."""

        def run() -> None:
            try:
                while not self._over.wait(seconds):
                    self.tick()
            except (OSError, ValueError):
                return  # the stream is closed; the next event meets that and says so

        threading.Thread(target=run, name="elastic-console", daemon=True).start()

    def _show(self, event: Event) -> None:
        self._progress.update(event)
        self._left.observe(event)
        kind = str(event["kind"])
        if kind in _MOVES:
            self._unshown = event
            self._quiet.heard(event, None)
            if self._is_due("progress"):
                self._show_progress()
            return
        text = describe(event)
        self._quiet.heard(event, text)
        if kind in ("data_ready", "run_ended"):
            self._unshown = None  # the line of this event says more
        if text is None:
            return
        always = event.get("final") is True
        alike = re.sub(r"\d+", "#", text)  # the same sentence with other numbers
        if kind in RATE_BOUND and not always and not self._is_due(alike):
            self._held[alike] = self._held.get(alike, 0) + 1
            return
        held = self._held.pop(alike, 0)
        self._write(_when(event), text + (f" (and {held} alike before it)" if held else ""))

    def tick(self) -> None:
        """After `QUIET_S` without an event say so, at most once per interval and per `QUIET_S`."""
        with self._lock:
            if self._quiet.seconds >= QUIET_S and self._is_due("quiet", QUIET_S):
                self._write(self._quiet.last_wall + self._quiet.seconds, self._quiet.text)

    def close(self) -> None:
        """Write the progress that waited for its turn, and how many facts were held back."""
        self._over.set()
        with self._lock:
            self._show_progress()
            held = sum(self._held.values())
            if held:
                text = f"{held} facts like earlier ones were not shown; they are events"
                self._write(self._quiet.last_wall, text)
                self._held.clear()

    def _is_due(self, what: str, at_least_s: float = 0.0) -> bool:
        now = self._clock()
        if now < self._due_s.get(what, now):
            return False
        self._due_s[what] = now + max(self._every_s, at_least_s)
        return True

    def _show_progress(self) -> None:
        event, self._unshown = self._unshown, None
        if event is not None:
            self._write(_when(event), progress_text(self._progress, self._left.seconds(self._progress)))

    def _write(self, wall_time: float, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        printable = text.encode(encoding, "backslashreplace").decode(encoding)
        self._stream.write(f"{stamp(wall_time, self._zone)} {printable}\n")
        self._stream.flush()


# ---------------------------------------------------------------------------------------- table


class LiveTable:
    """One table that is redrawn in place: islands as rows, the run above; facts scroll past above it."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        zone: tzinfo | None = None,
        refresh_per_second: float = 4.0,
    ) -> None:
        self._clock, self._zone = clock, zone
        self._progress, self._left = Progress(), TimeLeft(clock)
        self._quiet = _Quiet(clock)
        self._lock = threading.Lock()  # rich redraws on a thread of its own; never held while printing
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=refresh_per_second,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def show(self, event: Event) -> None:
        """Take the next event; from any thread."""
        with self._lock:
            self._progress.update(event)
            self._left.observe(event)
            text = describe(event)
            self._quiet.heard(event, text)
        if text is not None:
            style = "yellow" if event["kind"] in ("warning", "refused", "fell_back", "island_lost") else ""
            time_of_day = stamp(_when(event), self._zone)
            self._console.print(Text(f"{time_of_day} {text}", style=style))

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        self._live.stop()

    def render(self) -> RenderableType:
        """The table as it stands now."""
        with self._lock:
            table = run_table(self._progress, self._left.seconds(self._progress))
            if self._quiet.seconds < QUIET_S:
                return table
            return Group(table, Text(self._quiet.text, style="yellow"))


def run_table(progress: Progress, left_s: float | None) -> RenderableType:
    """Header and one row per island; also what `elastic status` shows on a terminal."""
    if progress.preparing is not None:
        _, done, total, _ = progress.preparing
        bar = ProgressBar(total=total or 1.0, completed=done, width=40, pulse=not total)
        return Group(bar, Text(preparing_text(progress)))
    header = Table.grid(padding=(0, 2))
    left = "" if left_s is None else f"{duration_text(left_s)} left"
    bar = ProgressBar(total=1.0, completed=progress.share, width=40)
    header.add_row(bar, f"{progress.share:.0%}", left)
    facts = Text(
        f"{outer_text(progress)} | {count_text(progress.tokens_per_s)} tok/s"
        f" | up {bytes_text(progress.bytes_up)} down {bytes_text(progress.bytes_down)}",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("island")
    for name in ("step", "loss", "lr", "tok/s", "workers"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for name in ("version", "stall"):
        table.add_column(name, justify="right")
    for island in progress.islands.values():
        table.add_row(*_row(island))
    return Group(header, facts, table)


def _row(island: IslandProgress) -> list[str]:
    return [
        one_line(island.name, 40),
        f"{island.step:,}",
        loss_text(island.loss),
        "-" if island.lr is None else f"{island.lr:.1e}",
        count_text(island.tokens_per_s),
        str(island.workers),
        island.state,
        "-" if island.version is None else f"v{island.version}",
        duration_text(island.stall_s),
    ]
