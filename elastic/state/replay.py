"""From records to parameters: the newest snapshot, then every merged delta after it, bit for bit.

An `outer` record says all that its step needs: the delta's file, `scale`, and `optimiser` (`lr`,
`momentum`, `codec_down`). So the state of any retained version follows from the run folder alone,
on any machine, and its digest must equal the one in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

    fragment: int
    version: int
    what: str
    stored: Stored


class Kept(NamedTuple):
    """A tensor file that was not let go."""

    fragment: int
    version: int
    what: str
    name: str


@dataclass
class LoadedOuter:
    """The newest outer state that the run folder still holds, and the records that lead to it."""

    states: list[OuterState]
    """One per fragment."""
    moments: Tensors
    """AdamW's moments of the newest anchor: `exp_avg/<name>`, `exp_avg_sq/<name>`; may be empty."""
    records: list[Record]
    """The lineage up to the state: shorter than what was asked for if files were bad."""
    kept: list[Kept] = field(default_factory=list)
    """Tensor files not retired."""

    @property
    def theta(self) -> Tensors:
        """The global parameters, all fragments together."""
        return {name: value for state in self.states for name, value in state.theta.items()}

    @property
    def last(self) -> Record:
        """The record to continue from."""
        return self.records[-1]

    @property
    def version(self) -> int:
        """The version that every fragment has reached."""
        return int(min(self.last.body["versions"]))

    @property
    def committed(self) -> RangeSet:
        """Positions that the records commit."""
        return committed_by(self.records)

    @property
    def adam_steps(self) -> int:
        """AdamW steps at the newest anchor, 0 without one."""
        return int(next((r.body["adam_steps"] for r in self.records[::-1] if "adam_steps" in r.body), 0))

    @property
    def last_fragment(self) -> int:
        """The fragment of the newest outer step; -1 if an anchor came after it, or none was taken."""
        newest = next((record for record in self.records[::-1] if is_step(record)), None)
        return -1 if newest is None or newest.kind == "anchor" else int(newest.body["fragment"])

    @property
    def merged_turns(self) -> list[dict[str, tuple[int, int]]]:
        """By fragment: which contributions its newest version took in."""
        turns: list[dict[str, tuple[int, int]]] = [{} for _ in self.states]
        for record in self.records:
            if record.kind == "anchor":
                turns = [{} for _ in self.states]
            elif record.kind == "outer":
                turns[record.body["fragment"]] = turns_of(record.body["contributions"])
        return turns


def turns_of(contributions: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """(generation, seq) of each island's newest one among the contributions of a record."""
    turns: dict[str, tuple[int, int]] = {}
    for entry in contributions:
        turn = (int(entry["generation"]), int(entry["seq"]))
        turns[entry["island"]] = max(turn, turns.get(entry["island"], turn))
    return turns


def load_outer(storage: Storage, lineage: Lineage, fell_back: FallBack | None = None) -> LoadedOuter:
    """Load each fragment's newest snapshot that is whole and replay the deltas after it.

    A bad snapshot leads to the one before it; a bad delta ends the replay before it, and the records
    from there on are left out for all fragments, so that what they committed is trained again.
    `fell_back(name, reason, instead)` is told of each bad file, those of the lineage first. Raises
    IntegrityError if a fragment has no snapshot that can be used.
    """
    records = lineage.records
    told: set[tuple[str, str, str]] = set()

    def tell(name: str, reason: str, instead: str) -> None:
        if (name, reason, instead) not in told and fell_back is not None:
            fell_back(name, reason, instead)
        told.add((name, reason, instead))

    for skipped in lineage.skipped:
        tell(skipped.name, skipped.reason, records[-1].name if records else "")
    retired = {name for record in records for name in record.body.get("retired", ())}
    fragments = len(records[-1].body["versions"]) if records else 1
    stop, loaded, fragment = len(records), [], 0
    while fragment < fragments:
        one = _load_fragment(storage, records[:stop], fragment, retired, tell)
        if one.stop < stop:  # the other fragments must not be ahead of what these records say
            stop, loaded, fragment = one.stop, [], 0
            continue
        loaded.append(one)
        fragment += 1
    kept = [Kept(f.fragment, f.version, f.what, f.stored.name) for r in records[:stop] for f in files_of(r)]
    return LoadedOuter(
        [one.state for one in loaded],
        {name: value for one in loaded for name, value in one.moments.items()},
        records[:stop],
        [entry for entry in kept if entry.name not in retired],
    )


@dataclass(frozen=True)
class _Loaded:
    """One fragment, and the number of records up to which it could be followed."""

    state: OuterState
    moments: Tensors
    stop: int


def _load_fragment(
    storage: Storage, records: list[Record], fragment: int, retired: set[str], tell: FallBack
) -> _Loaded:
    """The newest usable snapshot of a fragment, and the deltas after it as far as they are good."""
    candidates = [
        (index, file)
        for index, record in enumerate(records)
        for file in files_of(record)
        if file.what == "snapshot" and file.fragment == fragment and file.stored.name not in retired
    ]
    for position, (index, file) in reversed([*enumerate(candidates)]):
        instead = candidates[position - 1][1].stored.name if position else "nothing older is left"
        try:
            state, held = load_snapshot(storage, file.stored)
        except IntegrityError as error:
            tell(file.stored.name, _reason(error), instead)
            continue
        stop = _replay(storage, records, index, fragment, state, tell)
        if stop < 0:  # the deltas do not lead to the recorded digest: only the snapshot itself is sure
            state, stop = _state_of(held, file.stored.name), _before_next_step(records, index, fragment)
        moments = {name: value for name, value in held.items() if name.partition("/")[0] in _MOMENTS}
        return _Loaded(state, moments, stop)
    raise IntegrityError(
        "no snapshot of the outer parameters can be used",
        where=f"{storage.url}/outer",
        saw=f"{len(candidates)} snapshots of fragment {fragment} named by {len(records)} records",
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
        fragment = int(entry.get("fragment", record.body.get("fragment", 0)))
        yield TensorFile(fragment, version, str(entry["what"]), Stored.from_json(entry))


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


def is_step(record: Record, fragment: int | None = None) -> bool:
    """True if the record raises a version: of this fragment, or of any."""
    if record.kind == "anchor":
        return True
    return record.kind == "outer" and fragment in (None, record.body["fragment"])


def digest_in(record: Record, fragment: int) -> str | None:
    """The digest that a record gives for a fragment's published values."""
    digests = record.body.get("digests")
    return digests[fragment] if digests else record.body.get("digest")


def _replay(
    storage: Storage, records: list[Record], index: int, fragment: int, state: OuterState, tell: FallBack
) -> int:
    """Replay from the record at `index` on; the number of records then in force, -1 on a wrong digest."""
    stop, checked = len(records), records[index]
    for position in range(index + 1, len(records)):
        record = records[position]
        if not is_step(record, fragment):
            continue
        try:
            apply(storage, record, state)
        except IntegrityError as error:
            bad = next((f.stored.name for f in files_of(record) if f.what == "delta"), record.name)
            tell(bad, _reason(error), f"version {checked.body.get('version', 0)}")
            stop = position
            break
        checked = record
    expected = digest_in(checked, fragment)
    if checked is not records[index] and expected not in (None, digest(state.published)):
        tell(checked.name, "replaying the deltas gives other bits than its digest says", records[index].name)
        return -1
    return stop


def _before_next_step(records: list[Record], index: int, fragment: int) -> int:
    later = range(index + 1, len(records))
    return next((position for position in later if is_step(records[position], fragment)), len(records))


def _state_of(held: Tensors, name: str) -> OuterState:
    parts: dict[str, Tensors] = {part: {} for part in _PARTS}
    for key, value in held.items():
        part, _, parameter = key.partition("/")
        if part in parts:
            parts[part][parameter] = value
    if not parts["theta"] or any(parts[part].keys() != parts["theta"].keys() for part in _PARTS):
        saw = ", ".join(f"{len(parts[part])} of {part}" for part in _PARTS)
        raise IntegrityError("not a whole snapshot", where=name, saw=saw)
    return OuterState(parts["theta"], parts["momentum"], parts["published"])


def _reason(error: IntegrityError) -> str:
    return f"{error.what}; saw {error.saw}" if error.saw else error.what
