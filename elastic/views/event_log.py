"""The event log of a run: facts go out as immutable segments, and are read back in order.

A writer keeps facts in memory and a background thread writes them as
`events/<writer>/<number>.jsonl`, create-only, so that an event never waits for storage and a reader
never sees half a segment. A process that is killed loses at most what it buffered (`flush_every_s`).
"""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from elastic.base.errors import IntegrityError, RunFolderError
from elastic.base.events import make_event

if TYPE_CHECKING:
    from elastic.state.storage import Storage

Event = dict[str, object]
Listener = Callable[[Event], None]

PROGRESS = "island_progress"
"""The only kind that may be left out: a later one says the same and more."""

_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SEGMENT = re.compile(r"events/([^/]+)/(\d{6,})\.jsonl")
_READ_AT_ONCE = 16


def plain(value: object) -> object:
    """`value` as JSON can hold it: tuples become lists, array scalars Python numbers.

    Non-finite numbers become the strings `nan`, `inf` and `-inf`. Raises TypeError for anything else.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if hasattr(value, "item"):  # a scalar of torch or numpy
        return plain(value.item())
    raise TypeError(f"an event cannot hold {type(value).__name__}: {value!r}")


def segment_name(writer: str, number: int) -> str:
    """Name of a segment in the run folder."""
    return f"events/{writer}/{number:06d}.jsonl"


class EventLog:
    """An `EventSink` that writes segments in the background and tells listeners at once.

    `clock` is the wall clock that stamps events. One process uses one writer name; another attempt
    should use another name (`controller-a2`), and one that finds segments of its name goes on after them.

    While storage is away, facts are kept in memory; only `island_progress` is left out, and counted in
    `dropped_progress`, once `max_buffered` events wait. A warning tells it afterwards. `error` is what
    the last write met; `close` tries once more and raises it.
    """

    def __init__(
        self,
        storage: Storage,
        writer: str,
        clock: Callable[[], float] = time.time,
        flush_every_s: float = 5.0,
        flush_every: int = 200,
        max_buffered: int = 10_000,
    ) -> None:
        if not _WRITER.fullmatch(writer):
            raise ValueError(f"a writer is letters, digits, '.', '_' and '-', not {writer!r}")
        self.writer = writer
        self.dropped_progress = 0
        self.error: Exception | None = None
        self._storage, self._clock = storage, clock
        self._flush_every_s, self._flush_every, self._max_buffered = flush_every_s, flush_every, max_buffered
        self._listeners: list[Listener] = []
        self._buffer: list[str] = []
        self._unwritten: tuple[str, bytes] | None = None  # a segment whose write failed: retried as it is
        self._unwritten_lines = 0
        self._told_dropped = 0
        self._closed = False
        self._segment, self._number = self._continue()
        self._lock = threading.RLock()  # buffer, numbers, listeners; a listener may emit
        self._writing = threading.Lock()  # one segment at a time; taken before the lock above, never after
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"events-{writer}", daemon=True)
        self._thread.start()

    def _continue(self) -> tuple[int, int]:
        """Next segment and next event number after what this writer name has already written."""
        mine = _segments(self._storage, f"events/{self.writer}")
        if not mine:
            return 0, 0
        name = segment_name(*mine[-1])
        last = _parse(name, self._storage.read(name))[-1]
        return mine[-1][1] + 1, int(str(last["n"])) + 1

    # ------------------------------------------------------------------------------- emit

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(event)` for every event from now on, in order, on the emitting thread.

        It should be quick and must not call `flush` or `close`. If it raises, it is dropped and a
        warning says so: a broken view does not end a run.
        """
        with self._lock:
            self._listeners.append(listener)

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take one event; never waits for storage. Raises ValueError if it is not in the catalogue."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"event {kind!r} after the event log {self.writer!r} was closed")
            event = make_event(kind, self.writer, self._number, self._clock(), fields)
            event = {key: plain(value) for key, value in event.items()}
            self._number += 1  # also of a dropped event: a gap in `n` shows where one is missing
            waiting = len(self._buffer) + self._unwritten_lines
            if kind == PROGRESS and waiting >= self._max_buffered:
                self.dropped_progress += 1
            else:
                self._buffer.append(json.dumps(event, allow_nan=False))
                if len(self._buffer) >= self._flush_every:
                    self._wake.set()
            self.tell(event)

    def tell(self, event: Event) -> None:
        """Pass an event that another process has logged to the listeners of this one."""
        with self._lock:
            for listener in tuple(self._listeners):
                try:
                    listener(event)
                except Exception as error:  # any view, any fault: reported, and the run goes on
                    self._listeners.remove(listener)
                    name = getattr(listener, "__qualname__", type(listener).__name__)
                    if not self._closed:
                        self.emit("warning", {"what": f"{name} failed and is switched off: {error!r}"})

    # ------------------------------------------------------------------------------ write

    def _run(self) -> None:
        while True:
            self._wake.wait(self._flush_every_s)
            self._wake.clear()
            if self._closed:
                return  # `close` writes the rest and raises what that meets
            try:
                self.flush()
            except Exception as error:  # kept for `close`, which raises it; tried again next time
                self.error = error

    def flush(self) -> None:
        """Write everything that waits; returns when it is in storage, raises what storage raised."""
        with self._writing:
            while (segment := self._take()) is not None:
                name, data = segment
                try:
                    self._storage.create(name, data)
                except FileExistsError:  # our own write whose answer was lost, or a second writer
                    if self._storage.read(name) != data:
                        raise RunFolderError(
                            "two processes write events under one name",
                            where=name,
                            fix="end the older one; every process needs a writer name of its own",
                        ) from None
                self._unwritten, self._unwritten_lines = None, 0
                self.error = None
        self._tell_dropped()

    def _take(self) -> tuple[str, bytes] | None:
        """Name and bytes of the next segment: the one that failed, else all waiting events, else None."""
        with self._lock:
            if self._unwritten is None and self._buffer:
                data = ("\n".join(self._buffer) + "\n").encode()
                self._unwritten = (segment_name(self.writer, self._segment), data)
                self._unwritten_lines = len(self._buffer)
                self._segment += 1
                self._buffer = []
        return self._unwritten

    def _tell_dropped(self) -> None:
        with self._lock:
            missing = self.dropped_progress - self._told_dropped
            if missing and not self._closed:
                self._told_dropped = self.dropped_progress
                what = f"storage was away: {missing} progress events were not logged"
                self.emit("warning", {"what": what})

    def close(self) -> None:
        """Write the rest, end the thread, and raise what the last write met. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._tell_dropped()
            self._closed = True
        self._wake.set()
        self._thread.join()
        self.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ----------------------------------------------------------------------------------------- read


def _segments(storage: Storage, folder: str = "events") -> list[tuple[str, int]]:
    """(writer, number) of every complete segment; temporary files and strangers do not match."""
    found = (_SEGMENT.fullmatch(name) for name in storage.list(folder))
    return sorted((match[1], int(match[2])) for match in found if match)


def _parse(name: str, data: bytes) -> list[Event]:
    events: list[Event] = []
    for line_number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or not {"time", "writer", "n", "kind"} <= event.keys():
                raise ValueError("an event needs time, writer, n and kind")
        except ValueError as error:
            raise IntegrityError(
                "a line is not an event",
                where=f"{name}:{line_number}",
                saw=str(error),
                fix="the segment was altered after it was written; training does not read it, remove it",
            ) from error
        events.append(event)
    return events


def _in_order(streams: Iterable[Iterable[Event]]) -> Iterator[Event]:
    """Merge by (time, writer, n); each writer keeps its own order even if its clock was set back."""

    def keyed(stream: Iterable[Event]) -> Iterator[tuple[tuple[float, str, int], Event]]:
        latest = float("-inf")
        for event in stream:
            latest = max(latest, float(str(event["time"])))
            yield (latest, str(event["writer"]), int(str(event["n"]))), event

    return (event for _, event in heapq.merge(*map(keyed, streams), key=lambda pair: pair[0]))


def read_events(storage: Storage) -> Iterator[Event]:
    """All events of all writers, a few segments of each writer in memory. Raises IntegrityError."""
    names: dict[str, list[str]] = {}
    for writer, number in _segments(storage):
        names.setdefault(writer, []).append(segment_name(writer, number))

    def stream(mine: list[str]) -> Iterator[Event]:
        for first in range(0, len(mine), _READ_AT_ONCE):
            for name, data in storage.read_many(mine[first : first + _READ_AT_ONCE]).items():
                yield from _parse(name, data)

    return _in_order([stream(mine) for mine in names.values()])


class EventTail:
    """Reads what is new since the last `poll`, for views that watch a run.

    With `newest` the first poll reads, of each writer, only the first segment and that many of the newest
    ones, so that a look at a month-old run stays cheap. Damaged segments are named in `damaged`.
    """

    def __init__(self, storage: Storage, newest: int | None = None) -> None:
        self._storage, self._newest = storage, newest
        self._next: dict[str, int] = {}
        self.damaged: list[str] = []

    def poll(self) -> list[Event]:
        """New events in order; a late segment of another writer may be older than earlier polls."""
        numbers: dict[str, list[int]] = {}
        for writer, number in _segments(self._storage):
            if number >= self._next.get(writer, 0):
                numbers.setdefault(writer, []).append(number)
        wanted: dict[str, str] = {}
        for writer, found in numbers.items():
            if self._newest is not None and writer not in self._next and len(found) > self._newest + 1:
                found = [found[0], *found[-self._newest :]]
            self._next[writer] = found[-1] + 1
            wanted.update({segment_name(writer, number): writer for number in found})
        streams: dict[str, list[Event]] = {}
        for name, data in self._storage.read_many(wanted).items():
            try:
                streams.setdefault(wanted[name], []).extend(_parse(name, data))
            except IntegrityError as error:
                self.damaged.append(str(error).splitlines()[0])
        return list(_in_order(streams.values()))
