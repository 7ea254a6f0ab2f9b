"""Build a `Synchronizer` over a run folder: its store, its first parameters, its event log."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic.base.events import EventSink
from elastic.policy.plan import warmup_sequences
from elastic.runtime.board import RunSetup
from elastic.runtime.entering import parameter_fingerprint
from elastic.runtime.synchronizer import Synchronizer
from elastic.state.initial import initial_fragments
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.storage import Storage


def open_synchronizer(
    setup: RunSetup, storage: Storage, events: EventSink, clock: Callable[[], float] = time.monotonic
) -> Synchronizer:
    """Continue from the newest durable state, or begin with the job's initial parameters."""

    def fell_back(name: str, reason: str, instead: str) -> None:
        events.emit("fell_back", {"name": name, "reason": reason, "instead": instead})

    total = setup.total_sequences
    store = OuterStore.open(
        storage,
        setup.job,
        setup.run,
        setup.epoch,
        load_records(storage),
        lambda: initial_fragments(setup.job, setup.vocab_size),
        {"total_sequences": total, "block_sequences": setup.block_sequences},
        fell_back,
        phase="synchronous" if warmup_sequences(setup.job, total, len(setup.islands)) else "outer",
    )
    return Synchronizer(setup, store, parameter_fingerprint(store.shapes, store.names), events, clock)
