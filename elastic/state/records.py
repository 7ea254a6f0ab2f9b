"""The records of a run: a chain of create-only files, one per outer step, that *is* the run's state.

A record is sealed JSON that names the hash of the one before it. `seq` counts without gaps over the
whole run; an attempt writes under the epoch of its lock. So a removed, altered or foreign record is
always found, and a driver that lost its lock can only add to a branch that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.base.errors import IntegrityError, LockHeldError
from elastic.state.canonical import seal, unseal
from elastic.state.layout import RECORDS, parse_record_name, record_name
from elastic.state.storage import Storage

_FIELDS = {"epoch", "seq", "kind", "body", "previous_sha256", "sha256"}
_FIRST = ("start", "resume")


@dataclass(frozen=True)
class Record:
    """One fact of the synchronizer, durable before anything that follows from it is published."""

    epoch: int
    seq: int
    kind: str
    body: dict[str, Any]
    previous_sha256: str
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the run folder."""
        return record_name(self.epoch, self.seq)

    @property
    def key(self) -> dict[str, Any]:
        """What a successor says about it: epoch, seq and hash."""
        return {"epoch": self.epoch, "seq": self.seq, "sha256": self.sha256}


@dataclass(frozen=True)
class Skipped:
    """A stored file that was not used, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Lineage:
    """The records that lead to the newest valid state, in order, and what was skipped on the way.

    `skipped`: files that are damaged, missing, or follow such a file; each deserves a `fell_back` event.
    `abandoned`: names on branches that a later epoch did not continue (a driver that lost its lock, or
    records lost in an earlier fall-back). They are fine.
    """

    records: list[Record]
    skipped: list[Skipped] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)

    @property
    def last(self) -> Record | None:
        """The newest record, None in a new run."""
        return self.records[-1] if self.records else None


class RecordLog:
    """Appends to the chain. `after` is the record to continue from: `load_records(...).last`.

    The first record of an epoch is `start` in a new run and `resume` otherwise; `resume` gets
    `previous`, the record it continues from, written into its body.
    """

    def __init__(self, storage: Storage, epoch: int, after: Record | None = None) -> None:
        if after is not None and epoch <= after.epoch:
            raise ValueError(f"epoch {epoch} does not lie above epoch {after.epoch} of {after.name}")
        self.storage, self.epoch, self.last = storage, epoch, after

    def append(self, kind: str, body: Mapping[str, Any]) -> Record:
        """Write the next record; when this returns, it is durable.

        Raises LockHeldError if the name is taken, or a run is there before its `start`: then another
        driver is at work.
        """
        content = dict(body)
        first = self.last is None or self.last.epoch != self.epoch
        wanted = ("start" if self.last is None else "resume") if first else None
        if wanted != (kind if kind in _FIRST else None):
            raise ValueError(
                f"a record of kind {kind!r} cannot stand here; expected {wanted or 'an outer step'!r}"
            )
        if kind == "resume" and self.last is not None:
            content["previous"] = self.last.key
        seq = self.last.seq + 1 if self.last else 0
        previous = self.last.sha256 if self.last else ""
        name = record_name(self.epoch, seq)
        if kind == "start" and self.storage.list(RECORDS):
            raise LockHeldError(
                "this run has been started already",
                where=f"{self.storage.url}/{RECORDS}",
                fix="run the same command again; it continues the run",
            )
        data, _ = seal(
            {"epoch": self.epoch, "seq": seq, "kind": kind, "body": content, "previous_sha256": previous},
            where=name,
        )
        try:
            self.storage.create(name, data)
        except FileExistsError as error:
            raise LockHeldError(
                "another driver writes records under this epoch",
                where=name,
                fix="end the other driver; then the same command continues the run",
            ) from error
        self.last = parse_record(name, data)
        return self.last


def load_records(storage: Storage) -> Lineage:
    """Read the newest valid lineage. Raises IntegrityError if there are records, but no usable one.

    Taken is the highest epoch whose first record is valid and whose chain back to the first record of
    the run is whole; of that epoch, every record up to the first damaged or missing one.
    """
    names = {key: name for name in storage.list(RECORDS) if (key := parse_record_name(name))}
    reader = _Reader(names, storage.read_many(names.values()))
    for epoch in sorted({epoch for epoch, _ in names}, reverse=True):
        records = reader.lineage(epoch)
        if records:
            used = {record.name for record in records}
            damaged = {skipped.name for skipped in reader.skipped}
            rest = [n for n in sorted(names.values()) if n not in used and n not in damaged]
            return Lineage(records, reader.skipped, rest)
    if names:
        raise IntegrityError(
            "no usable record is left",
            where=f"{storage.url}/{RECORDS}",
            saw="; ".join(f"{s.name}: {s.reason}" for s in reader.skipped[:5]),
            fix="restore the records from a copy; a new run needs a new run_folder",
        )
    return Lineage([])


def parse_record(name: str, data: bytes) -> Record:
    """Read one record file; raises IntegrityError if it is not what its hash or its name says."""
    fields = unseal(data, where=name)
    if set(fields) != _FIELDS or not isinstance(fields["body"], dict):
        raise IntegrityError("not a record", where=name, saw=f"fields {sorted(fields)}")
    record = Record(**fields)
    if record.kind == "resume" and not isinstance(record.body.get("previous"), dict):
        raise IntegrityError("a resume record that does not say what it continues", where=name)
    if parse_record_name(name) != (record.epoch, record.seq):
        raise IntegrityError("the record belongs under another name", where=name, saw=record.name)
    return record


def read_abandoned(storage: Storage, lineage: Lineage) -> list[Record]:
    """The valid records on branches that were not continued, in no useful order."""
    found: list[Record] = []
    for name, data in storage.read_many(lineage.abandoned).items():
        try:
            found.append(parse_record(name, data))
        except IntegrityError:
            continue  # the fall-back that left it behind has named it; it is no part of the state
    return found


class _Reader:
    """Walks the files that a listing found, and keeps what had to be skipped."""

    def __init__(self, names: Mapping[tuple[int, int], str], contents: Mapping[str, bytes]) -> None:
        self.names, self.contents = names, contents
        self.skipped: list[Skipped] = []
        self._parsed: dict[tuple[int, int], Record | None] = {}

    def lineage(self, epoch: int) -> list[Record]:
        """All records that lead to the newest valid record of this epoch; empty if there is none."""
        seqs = sorted(seq for e, seq in self.names if e == epoch)
        first = self._record(epoch, seqs[0])
        if first is None:
            return self._give_up(epoch, seqs[1:], self.names[epoch, seqs[0]])
        if first.kind not in _FIRST:
            return self._give_up(epoch, seqs, record_name(epoch, seqs[0] - 1), missing=True)
        before = self._before(first)
        if before is None:
            return self._give_up(epoch, seqs[1:], first.name)
        return before + self._forward(epoch, first, seqs)

    def _forward(self, epoch: int, first: Record, seqs: list[int]) -> list[Record]:
        """The records of an epoch up to the first that is damaged, missing, or not of this chain."""
        chain = [first]
        for position, seq in enumerate(seqs[1:], start=1):
            if seq != chain[-1].seq + 1:
                self._give_up(epoch, seqs[position:], record_name(epoch, chain[-1].seq + 1), missing=True)
                break
            record = self._record(epoch, seq)
            if record is not None and record.previous_sha256 != chain[-1].sha256:
                self._skip(record.name, "its predecessor has another hash")
                record = None
            if record is None:
                self._give_up(epoch, seqs[position + 1 :], self.names[epoch, seq])
                break
            chain.append(record)
        return chain

    def _before(self, first: Record) -> list[Record] | None:
        """The records that the first record of an epoch continues; None if that chain is not whole."""
        if first.kind == "start":
            if first.seq == 0 and first.previous_sha256 == "":
                return []
            self._skip(first.name, "a start record that is not the first")
            return None
        chain: list[Record] = []
        here = first
        while here.kind != "start":
            key = _key_before(here)
            if key not in self.names:
                self._skip(record_name(*key), "it is missing")
            previous = self._record(*key) if key in self.names else None
            if previous is None or previous.sha256 != here.previous_sha256:
                self._skip(first.name, f"the chain before it breaks at {record_name(*key)}")
                return None
            chain.append(previous)
            here = previous
        return chain[::-1]

    def _record(self, epoch: int, seq: int) -> Record | None:
        key = (epoch, seq)
        if key not in self._parsed:
            self._parsed[key] = None
            name = self.names[key]
            try:
                self._parsed[key] = parse_record(name, self.contents[name])
            except IntegrityError as error:
                self._skip(name, f"{error.what}; saw {error.saw}")
            except KeyError:
                self._skip(name, "it vanished while the records were read")
        return self._parsed[key]

    def _give_up(self, epoch: int, seqs: list[int], name: str, *, missing: bool = False) -> list[Record]:
        if missing:
            self._skip(name, "it is missing")
        for seq in seqs:
            self._skip(self.names[epoch, seq], f"it follows {name}")
        return []

    def _skip(self, name: str, reason: str) -> None:
        if name not in {skipped.name for skipped in self.skipped}:
            self.skipped.append(Skipped(name, reason))


def _key_before(record: Record) -> tuple[int, int]:
    """Epoch and seq of the record that this one continues."""
    epoch = record.body["previous"]["epoch"] if record.kind == "resume" else record.epoch
    return epoch, record.seq - 1
