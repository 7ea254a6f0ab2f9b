"""The checks that need nothing but the records (and result.json): pure functions over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.base.ranges import RangeSet
from elastic.state.records import Lineage, Record
from elastic.state.replay import committed_by, is_step


@dataclass(frozen=True)
class Check:
    """One promise, whether it is kept, and the numbers; or which file breaks it, and what that means."""

    name: str
    ok: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def verdict(name: str, problems: Sequence[str], good: str) -> Check:
    """A check that failed with the first problems, or passed with `good`."""
    if not problems:
        return Check(name, True, good)
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return Check(name, False, "; ".join(problems[:3]) + more)


def check_chain(lineage: Lineage, run: Mapping[str, Any]) -> Check:
    """Every record is there, unaltered, and names the hash of the one before it."""
    problems = [f"{skipped.name}: {skipped.reason}" for skipped in lineage.skipped]
    if problems:
        last = lineage.last.name if lineage.last else "nothing"
        problems.insert(
            1, f"the run would go on from {last} and redo what came later, so other checks may fail too"
        )
    for record in lineage.records:
        if run and record.body.get("run") != run.get("run"):
            problems.append(
                f"{record.name}: belongs to run {record.body.get('run')}, run.json says {run.get('run')}"
            )
    attempts = len({record.epoch for record in lineage.records})
    good = f"{len(lineage.records)} records of {attempts} attempts, unbroken"
    if lineage.abandoned:
        good += f"; {len(lineage.abandoned)} on abandoned branches"
    return verdict("records", problems, good)


def check_versions(records: Sequence[Record]) -> Check:
    """The versions of each fragment rise by one from 0."""
    problems: list[str] = []
    versions: list[int] = []
    for record in records:
        said = record.body["versions"]
        if record.kind == "start":
            versions = [0] * len(said)
        elif is_step(record):
            fragment, version = record.body["fragment"], record.body["version"]
            raised = range(len(versions)) if record.kind == "anchor" else [fragment]
            if any(version != versions[each] + 1 for each in raised):
                problems.append(
                    f"{record.name}: version {version} of fragment {fragment} follows version "
                    f"{versions[fragment]}; what led from one to the other is lost"
                )
            for each in raised:
                versions[each] = version
        if said != versions:
            problems.append(f"{record.name}: says versions {said}, the steps lead to {versions}")
            versions = list(said)
    newest = ", ".join(f"fragment {number}: {version}" for number, version in enumerate(versions))
    return verdict("versions", problems, f"no gaps; newest {newest}")


def total_sequences(records: Sequence[Record]) -> int:
    """The sequences of the budget, as the newest attempt says."""
    return next(int(r.body["total_sequences"]) for r in reversed(records) if "total_sequences" in r.body)


def check_sequences(records: Sequence[Record]) -> Check:
    """Every sequence is committed once, or still in the queue."""
    problems: list[str] = []
    total, seen = total_sequences(records), RangeSet()
    for record in records:
        new = RangeSet.from_json(record.body.get("committed", []))
        if twice := seen & new:
            problems.append(f"{record.name}: commits {_shown(twice)} a second time")
        seen = seen | new
    if outside := seen - RangeSet([(0, total)]):
        problems.append(f"{_shown(outside)} are committed, but the budget has {total}")
    good = f"{len(seen)} committed once, {total - len(seen)} queued, {total} in all"
    return verdict("sequences", problems, good)


def check_contributions(records: Sequence[Record]) -> Check:
    """What a record commits was merged in every fragment, and no contribution is merged twice."""
    problems: list[str] = []
    ids: dict[str, str] = {}
    count = 0
    merged: list[RangeSet] = []
    for record in records:
        contributions = record.body.get("contributions", [])
        trained = RangeSet()
        for contribution in contributions:
            ranges = RangeSet.from_json(contribution["ranges"])
            if twice := trained & ranges:
                problems.append(f"{record.name}: two contributions trained {_shown(twice)}")
            trained = trained | ranges
            before = ids.setdefault(contribution["id"], record.name)
            if before != record.name:
                problems.append(
                    f"{record.name}: contribution {contribution['id']} was merged by {before} already"
                )
        committed = RangeSet.from_json(record.body.get("committed", []))
        merged = merged or [RangeSet() for _ in record.body["versions"]]
        for fragment in range(len(merged)):
            if is_step(record, fragment):
                merged[fragment] = merged[fragment] | trained
        if len(merged) == 1 and committed != trained:
            problems.append(
                f"{record.name}: commits {len(committed)} sequences, its contributions trained {len(trained)}"
            )
        for fragment, known in enumerate(merged):
            if unmerged := committed - known:
                problems.append(
                    f"{record.name}: commits {_shown(unmerged)} that fragment {fragment} has not merged"
                )
        merged = [known - committed for known in merged]
        weights = [contribution["weight"] for contribution in contributions]
        if sum(weights) > 1.0 + 1e-6:
            problems.append(
                f"{record.name}: the weights of its contributions add up to {sum(weights):.6f}, more than 1"
            )
        count += len(contributions)
    return verdict("contributions", problems, f"{count} merged, their ranges are what was committed")


_COUNTERS = ("outer_steps", "synchronous_steps", "committed_tokens")


def check_result(result: Mapping[str, Any], records: Sequence[Record]) -> Check:
    """result.json says what the records say; if a later attempt was killed, those of an earlier one."""
    if not result.get("versions"):
        return Check(
            "result", True, f"status {result.get('status')}; the last attempt ended before it began to train"
        )
    ends = [i for i, r in enumerate(records) if i + 1 == len(records) or records[i + 1].kind == "resume"]
    problems = _differences(result, records)
    if not problems and result.get("status") == "done":
        total = total_sequences(records)
        if result.get("committed_sequences") != total:
            saw = result.get("committed_sequences")
            problems.append(f"result.json says done, but {saw} of {total} sequences are committed")
    if not problems:
        return Check("result", True, f"status {result.get('status')}, counters agree with the records")
    for end in reversed(ends[:-1]):
        if not _differences(result, records[: end + 1]):
            return Check("result", True, "result.json is of an earlier attempt and agrees with its records")
    return verdict("result", problems, "")


def _differences(result: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    last = records[-1].body
    expected = {"versions": last["versions"], "committed_sequences": len(committed_by(records))}
    expected |= {name: last["counters"][name] for name in _COUNTERS if name in last["counters"]}
    digests = [record.body["digest"] for record in records if "digest" in record.body]
    if digests and result.get("digest"):
        expected["digest"] = digests[-1]
    return [
        f"result.json: {name} is {result[name]}, the records say {value}"
        for name, value in expected.items()
        if name in result and result[name] != value
    ]


def _shown(ranges: RangeSet) -> str:
    first = ", ".join(f"{start}..{stop - 1}" for start, stop in ranges.pairs[:3])
    return f"{len(ranges)} sequences ({first}{', ...' if len(ranges.pairs) > 3 else ''})"
