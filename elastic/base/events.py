"""The catalogue of events: everything that happens in a run is one of these facts.

An event is one JSON line: `{"time": ..., "writer": ..., "n": ..., "kind": ..., <fields>}`. `time` is
the writer's own wall clock and is for people only; no decision compares it with another host's.
`n` counts the events of one writer. Progress, `elastic status` and reports are readers of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ALL_FRAGMENTS = -1
"""Fragment of an event about all parameters together; its version is the one that all have reached."""


@dataclass(frozen=True)
class Kind:
    """What an event says and which fields it has."""

    says: str
    fields: tuple[str, ...]


KINDS: dict[str, Kind] = {
    # the run
    "run_started": Kind("A driver began an attempt.", ("run", "attempt", "epoch", "continued", "versions")),
    "cluster": Kind("What is being done with the Ray cluster.", ("what",)),
    "derived": Kind("A value was chosen automatically.", ("key", "value", "why")),
    "data_progress": Kind("Preparing the corpus.", ("stage", "done", "total", "unit")),
    "data_ready": Kind(
        "The corpus is tokenised.",
        ("manifest", "train_sequences", "validation_sequences", "train_bytes", "validation_bytes", "skipped"),
    ),
    "data_changed": Kind("A source file differs from the manifest; the tokenised copy is used.", ("files",)),
    "run_stopping": Kind("The run is ending early.", ("reason", "signal")),
    "run_ended": Kind("The last event of an attempt.", ("status", "exit_code", "reason")),
    # islands
    "island_starting": Kind("An island is being placed.", ("island", "region", "workers")),
    "island_joined": Kind(
        "An island's workers are up and hold the current global parameters.",
        ("island", "generation", "workers", "device", "version", "digest", "resumed_step"),
    ),
    "island_progress": Kind(
        "What an island is doing, at a bounded rate.",
        (
            "island",
            "generation",
            "step",
            "loss",
            "lr",
            "grad_norm",
            "tokens",
            "tokens_per_s",
            "stall_s",
            "phase",
        ),
    ),
    "island_checkpoint": Kind("An island saved itself.", ("island", "generation", "step", "version", "name")),
    "island_lost": Kind(
        "An island stopped answering.", ("island", "generation", "reason", "returned_sequences")
    ),
    "island_restarting": Kind("The controller starts an island again.", ("island", "reason", "delay_s")),
    "island_left": Kind("An island ended in order.", ("island", "generation", "reason")),
    # the outer loop
    "outer_step": Kind(
        "Contributions were merged and a new version is durable.",
        (
            "version",
            "fragment",
            "phase",
            "islands",
            "tokens",
            "losses",
            "delta_norm",
            "digest",
            "committed_sequences",
            "total_sequences",
            "committed_tokens",
            "bytes_up",
            "bytes_down",
            "merge_s",
        ),
    ),
    "refused": Kind(
        "A contribution or a message was refused by name.", ("island", "generation", "id", "reason")
    ),
    "quarantined": Kind(
        "An island's contributions were refused again and again; it takes part no longer.",
        ("island", "generation", "reason"),
    ),
    "adopted": Kind(
        "An island adopted a version of a fragment (-1: of all).",
        ("island", "generation", "version", "fragment", "digest", "stall_s", "dropped_update_fraction"),
    ),
    "phase_changed": Kind("The warm-up ended.", ("phase", "version", "digest", "islands")),
    "validated": Kind(
        "The outer parameters were judged on held-out text.",
        ("version", "loss", "nats_per_byte", "sequences", "final"),
    ),
    # trouble
    "warning": Kind("Something deserves a look.", ("what",)),
    "fell_back": Kind("A stored file was bad, an older one is used.", ("name", "reason", "instead")),
}


class EventSink(Protocol):
    """Where events go. A Protocol so that decisions and arithmetic need not know who listens."""

    def emit(self, kind: str, fields: Mapping[str, object]) -> None:
        """Take one event; fields must be exactly those of `KINDS[kind]`."""


def make_event(
    kind: str, writer: str, number: int, wall_time: float, fields: Mapping[str, object]
) -> dict[str, object]:
    """Build one event and check it against the catalogue.

    Raises ValueError on an unknown kind, a missing or an unknown field: an event is an interface,
    and a misspelt field would vanish in silence.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown event kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    wanted = set(KINDS[kind].fields)
    if wanted != set(fields):
        missing, unknown = sorted(wanted - set(fields)), sorted(set(fields) - wanted)
        raise ValueError(f"event {kind!r}: missing fields {missing}, unknown fields {unknown}")
    return {"time": round(wall_time, 3), "writer": writer, "n": number, "kind": kind, **fields}
