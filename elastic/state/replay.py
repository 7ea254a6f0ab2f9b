"""From records to parameters: the newest snapshot, then every merged delta after it, bit for bit.

An `outer` record says all that its step needs: the delta's file, `scale`, and `optimiser` (`lr`,
`momentum`, `codec_down`). So the state of any retained version follows from the run folder alone,
on any machine, and its digest must equal the one in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.base.errors import ElasticError, IntegrityError
from elastic.base.ranges import RangeSet
from elastic.state import tensors
from elastic.state.records import Lineage, Record
from elastic.state.storage import Storage
from elastic.state.tensors import Stored
from elastic.training.digest import digest
from elastic.training.outer import OuterState

Tensors = dict[str, torch.Tensor]
FallBack = Callable[[str, str, str], None]

_PARTS = ("theta", "momentum", "published")
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TensorFile:
    """A tensor file that a record names. `what`: "snapshot" or "delta"."""

    version: int
    what: str
    stored: Stored


@dataclass
class LoadedOuter:
    """The newest outer state that the run folder still holds, and the records that lead to it."""

    state: OuterState
    moments: Tensors
    """AdamW's moments of the newest anchor: `exp_avg/<name>`, `exp_avg_sq/<name>`; may be empty."""
    records: list[Record]
    """The lineage up to the state: shorter than what was asked for if files were bad."""
    kept: list[tuple[int, str, str]] = field(default_factory=list)
    """Tensor files not retired: (version, what, name)."""

    @property
    def last(self) -> Record:
        """The record to continue from."""
        return self.records[-1]

    @property
    def version(self) -> int:
        """The version of the state."""
        return int(self.last.body["versions"][0])

    @property
    def committed(self) -> RangeSet:
        """Positions that the records commit."""
        return committed_by(self.records)

    @property
    def adam_steps(self) -> int:
        """AdamW steps at the newest anchor, 0 without one."""
        return int(next((r.body["adam_steps"] for r in self.records[::-1] if "adam_steps" in r.body), 0))


def load_outer(storage: Storage, lineage: Lineage, fell_back: FallBack | None = None) -> LoadedOuter:
    """Load the newest snapshot that is whole and replay the deltas after it.

    A bad snapshot leads to the one before it; a bad delta ends the replay before it, and the records
    from there on are left out, so that what they committed is trained again. `fell_back(name, reason,
    instead)` is told of each bad file, those of the lineage first. Raises IntegrityError if no
    snapshot can be used.
    """
    records = lineage.records
    tell: FallBack = fell_back or (lambda name, reason, instead: None)
    for skipped in lineage.skipped:
        tell(skipped.name, skipped.reason, records[-1].name if records else "")
    candidates = [(i, file) for i, r in enumerate(records) for file in files_of(r) if file.what == "snapshot"]
    retired = {name for record in records for name in record.body.get("retired", ())}
    candidates = [(i, file) for i, file in candidates if file.stored.name not in retired]
    for position, (index, file) in reversed([*enumerate(candidates)]):
        instead = candidates[position - 1][1].stored.name if position else "nothing older is left"
        try:
            state, held = load_snapshot(storage, file.stored)
        except IntegrityError as error:
            tell(file.stored.name, _reason(error), instead)
            continue
        stop = _replay(storage, records, index, state, tell)
        if stop < 0:  # the deltas do not lead to the recorded digest: only the snapshot itself is sure
            state, stop = _state_of(held, file.stored.name), _before_next_step(records, index)
        kept = [(f.version, f.what, f.stored.name) for r in records[:stop] for f in files_of(r)]
        return LoadedOuter(
            state,
            {name: value for name, value in held.items() if name.partition("/")[0] in _MOMENTS},
            records[:stop],
            [entry for entry in kept if entry[2] not in retired],
        )
    raise IntegrityError(
        "no snapshot of the outer parameters can be used",
        where=f"{storage.url}/outer",
        saw=f"{len(candidates)} snapshots named by {len(records)} records",
        fix="restore the files from a copy; a new run needs a new run_folder",
    )


def load_snapshot(storage: Storage, stored: Stored) -> tuple[OuterState, Tensors]:
    """The state that a snapshot holds, and all its tensors; raises IntegrityError if it is not whole."""
    held = tensors.load(storage, stored)
    return _state_of(held, stored.name), held


def files_of(record: Record) -> Iterator[TensorFile]:
    """The tensor files that a record names; `tensors` is one entry or a list of them."""
    entries: Any = record.body.get("tensors") or []
    version = int(record.body.get("version", 0))
    for entry in [entries] if isinstance(entries, dict) else entries:
        yield TensorFile(version, str(entry["what"]), Stored.from_json(entry))


def committed_by(records: Sequence[Record]) -> RangeSet:
    """The union of what records commit."""
    return RangeSet([pair for record in records for pair in record.body.get("committed", ())])


def apply(storage: Storage, record: Record, state: OuterState) -> None:
    """Carry out the step of an `outer` record; raises IntegrityError without a usable delta."""
    deltas = [file.stored for file in files_of(record) if file.what == "delta"]
    if not deltas:
        raise IntegrityError(
            "the record names no delta, so nothing leads over this version", where=record.name
        )
    optimiser = record.body.get("optimiser")
    if optimiser is None:
        raise ElasticError(
            "the record does not say how its step was taken",
            where=record.name,
            saw="no `optimiser` in its body",
            fix="write lr, momentum and codec_down into every outer record",
        )
    if record.body.get("moved", True):
        merged = tensors.load(storage, deltas[0])
        state.step(merged, optimiser["lr"], optimiser["momentum"], record.body["scale"])
    state.publish(optimiser["codec_down"])


def is_step(record: Record) -> bool:
    """True if the record raises a version."""
    return record.kind in ("outer", "anchor")


def _replay(storage: Storage, records: list[Record], index: int, state: OuterState, tell: FallBack) -> int:
    """Replay from the record at `index` on; the number of records then in force, -1 on a wrong digest."""
    stop, checked = len(records), records[index]
    for position in range(index + 1, len(records)):
        record = records[position]
        if not is_step(record):
            continue
        try:
            apply(storage, record, state)
        except IntegrityError as error:
            bad = next((f.stored.name for f in files_of(record) if f.what == "delta"), record.name)
            tell(bad, _reason(error), f"version {checked.body.get('version', 0)}")
            stop = position
            break
        checked = record
    expected = checked.body.get("digest")
    if checked is not records[index] and expected not in (None, digest(state.published)):
        tell(checked.name, "replaying the deltas gives other bits than its digest says", records[index].name)
        return -1
    return stop


def _before_next_step(records: list[Record], index: int) -> int:
    later = (position for position in range(index + 1, len(records)) if is_step(records[position]))
    return next(later, len(records))


def _state_of(held: Tensors, name: str) -> OuterState:
    parts: dict[str, Tensors] = {part: {} for part in _PARTS}
    for key, value in held.items():
        part, _, parameter = key.partition("/")
        if part in parts:
            parts[part][parameter] = value
    if not parts["theta"] or any(parts[part].keys() != parts["theta"].keys() for part in _PARTS):
        saw = ", ".join(f"{len(parts[part])} of {part}" for part in _PARTS)
        raise IntegrityError("not a whole snapshot", where=name, saw=saw)
    return OuterState(*(parts[part] for part in _PARTS))


def _reason(error: IntegrityError) -> str:
    return f"{error.what}; saw {error.saw}" if error.saw else error.what
