"""The digests that islands reported, against the digests of the records."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.base.events import ALL_FRAGMENTS
from elastic.state.audit_records import Check, verdict
from elastic.state.layout import EVENTS, parse_record_name
from elastic.state.records import Lineage, Record
from elastic.state.replay import digest_in
from elastic.state.storage import Storage

_AT_ONCE = 64


@dataclass(frozen=True)
class Reported:
    """Somebody held or announced a version with this digest."""

    kind: str
    who: str
    fragment: int
    version: int
    digest: str
    name: str


@dataclass(frozen=True)
class StoredEvents:
    """What the events say about digests, and the lines that are no events."""

    reported: list[Reported] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_digests(storage: Storage) -> StoredEvents:
    """Read all segments of events, a few at a time, and keep the digests of versions."""
    events = StoredEvents()
    names = [name for name in storage.list(EVENTS) if name.endswith(".jsonl")]
    for first in range(0, len(names), _AT_ONCE):
        for name, data in storage.read_many(names[first : first + _AT_ONCE]).items():
            for number, line in enumerate(data.splitlines(), start=1):
                try:
                    _take(json.loads(line), name, events)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    events.damaged.append(f"{name}:{number}: not an event ({type(error).__name__}: {error})")
    return events


def _take(event: dict, name: str, events: StoredEvents) -> None:
    kind = event["kind"]
    if kind in ("adopted", "island_joined", "outer_step") and event.get("digest"):
        who = event.get("island", event["writer"])
        version, fragment = int(event["version"]), int(event.get("fragment", ALL_FRAGMENTS))
        events.reported.append(Reported(kind, str(who), fragment, version, str(event["digest"]), name))


def check_digests(events: StoredEvents, lineage: Lineage, abandoned: Sequence[Record]) -> Check:
    """Every version that an island held, or that was announced, is the recorded one, bit for bit."""
    problems = list(events.damaged)
    known: dict[tuple[int, int], set[str]] = defaultdict(set)
    for record in [*lineage.records, *abandoned]:
        for fragment, version in enumerate(record.body["versions"]):
            if (expected := digest_in(record, fragment)) is not None:
                known[fragment, version].add(expected)
        if "digest" in record.body:
            known[ALL_FRAGMENTS, min(record.body["versions"])].add(record.body["digest"])
    newest = lineage.records[-1].body["versions"] if lineage.records else [0]
    redone = _redone_after(lineage)

    def newest_of(fragment: int) -> int:
        return min(newest) if fragment == ALL_FRAGMENTS else newest[fragment]

    compared, branched, unknown = 0, 0, 0
    beyond: dict[int, Reported] = {}
    for seen in events.reported:
        digests = known.get((seen.fragment, seen.version), set())
        if seen.digest in digests:
            compared += 1
        elif seen.version > redone:
            branched += 1  # an attempt whose last records were lost or belong to an abandoned branch
        elif seen.version > newest_of(seen.fragment):
            beyond.setdefault(seen.version, seen)
        elif not digests:
            unknown += 1
        else:
            problems.append(
                f"{seen.name}: {seen.who} held version {seen.version} with digest {seen.digest[:12]}..., "
                f"the record says {min(digests)[:12]}...; it trained from other parameters"
            )
    if beyond:
        last = beyond[max(beyond)]
        problems.insert(
            0,
            f"{last.name}: version {last.version} was known to {last.who}, but the records end at version "
            f"{newest_of(last.fragment)}; the newest records are lost",
        )
    good = f"{compared} reports of versions agree with the records"
    good += f"; {branched} of redone versions" if branched else ""
    good += f"; {unknown} of versions without a recorded digest" if unknown else ""
    return verdict("digests", problems, good)


def _redone_after(lineage: Lineage) -> float:
    """The lowest version after which some attempt's records were abandoned and its steps done again."""
    lowest = float("inf")
    abandoned = [key for name in lineage.abandoned if (key := parse_record_name(name))]
    for before, record in zip(lineage.records, lineage.records[1:], strict=False):
        forked = record.kind == "resume" and any(e == before.epoch and s > before.seq for e, s in abandoned)
        if forked:
            lowest = min(lowest, *before.body["versions"])
    return lowest
