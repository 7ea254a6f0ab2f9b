"""Ray actors around the plain classes: the synchronizer's."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import ray

from elastic.base.known import known
from elastic.exchange.link import (
    Beat,
    Command,
    Hello,
    Judgement,
    Member,
    Packet,
    Part,
    Receipt,
    Snapshot,
    Work,
)
from elastic.exchange.wire import Wire
from elastic.runtime.board import RunSetup
from elastic.runtime.opening import open_synchronizer
from elastic.runtime.ray_types import remote
from elastic.runtime.synchronizer import Synchronizer
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog

REFERENCES_KEPT = 6
EMPTY = Wire("fp32", {})


@remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 16, "bulk": 64})
class SynchronizerActor:
    """Carries calls to a `Synchronizer`; tensors go through the object store, by reference."""

    def __init__(self, setup: RunSetup, storage: Storage) -> None:
        self._setup, self._storage = setup, storage
        self._events = EventLog(storage, f"synchronizer-a{setup.epoch}")
        self._opened: Synchronizer | None = None
        self._references: OrderedDict[tuple[str, int, int], Any] = OrderedDict()

    @property
    def _synchronizer(self) -> Synchronizer:
        return known(self._opened)

    def _reference(self, kind: str, fragment: int, number: int, wire: Wire) -> list[Any]:
        """One object per version or step, however many ranks ask for it."""
        key = (kind, fragment, number)
        if key not in self._references:
            self._references[key] = ray.put(wire)
            while len(self._references) > REFERENCES_KEPT + 2 * len(self._synchronizer.store.states):
                self._references.popitem(last=False)
        return [self._references[key]]

    @ray.method(concurrency_group="control")
    def join(self, hello: Hello) -> int:
        """See `Link.join`."""
        return self._synchronizer.join(hello)

    @ray.method(concurrency_group="bulk")
    def enter(self, member: Member, hello: Hello, timeout_s: float) -> Any:
        """See `Link.enter`; the tensors come as references."""
        entry = self._synchronizer.enter(member, hello, timeout_s)
        if entry is None:
            return None
        tensors = self._reference("published", 0, sum(entry.versions), entry.tensors)
        moments = self._reference("moments", 0, sum(entry.versions), entry.moments) if entry.moments else []
        return dataclasses.replace(entry, tensors=EMPTY, moments=None), tensors, moments

    @ray.method(concurrency_group="control")
    def lease(self, member: Member, versions: tuple[int, ...]) -> Work:
        """See `Link.lease`."""
        return self._synchronizer.lease(member, versions)

    @ray.method(concurrency_group="bulk")
    def offer(self, part: Part) -> Receipt:
        """See `Link.offer`."""
        return self._synchronizer.offer(part)

    @ray.method(concurrency_group="bulk")
    def fetch(self, member: Member, kind: str, fragment: int, number: int, timeout_s: float) -> Any:
        """See `Link.fetch`; the tensors come as a reference."""
        packet = self._synchronizer.fetch(member, kind, fragment, number, timeout_s)
        if not isinstance(packet, Packet) or not packet.tensors.arrays:
            return packet
        return dataclasses.replace(packet, tensors=EMPTY), self._reference(
            kind, packet.fragment, packet.number, packet.tensors
        )

    @ray.method(concurrency_group="control")
    def beat(self, member: Member, beat: Beat) -> Command:
        """See `Link.beat`."""
        return self._synchronizer.beat(member, beat)

    @ray.method(concurrency_group="control")
    def judged(self, member: Member, judgement: Judgement) -> None:
        """See `Link.judged`."""
        self._synchronizer.judged(member, judgement)

    @ray.method(concurrency_group="control")
    def leave(self, member: Member, reason: str, checkpoint: str = "") -> None:
        """See `Link.leave`."""
        self._synchronizer.leave(member, reason, checkpoint)

    # ------------------------------------------------------------------------ for the controller

    @ray.method(concurrency_group="control")
    def open(self) -> None:
        """Load the newest durable state, or make version 0; raises what that raises."""
        self._opened = open_synchronizer(self._setup, self._storage, self._events)

    @ray.method(concurrency_group="control")
    def look(self, cursor: int) -> tuple[Snapshot, int, list[dict[str, Any]]]:
        """The state now, and the events since `cursor`."""
        cursor, events = self._synchronizer.events_since(cursor)
        return self._synchronizer.snapshot(), cursor, events

    @ray.method(concurrency_group="control")
    def begin(self) -> None:
        """Start with the islands that joined."""
        self._synchronizer.begin()

    @ray.method(concurrency_group="control")
    def stop(self, reason: str) -> None:
        """Ask all islands to save themselves and end."""
        self._synchronizer.stop(reason)

    @ray.method(concurrency_group="control")
    def declare_lost(self, island: str, reason: str) -> None:
        """The controller knows that an island died."""
        self._synchronizer.declare_lost(island, reason)

    @ray.method(concurrency_group="control")
    def close(self) -> Snapshot:
        """End the merging thread, write the last events; returns the final state."""
        self._synchronizer.close()
        self._events.close()
        return self._synchronizer.snapshot()
