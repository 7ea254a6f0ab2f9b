"""`python -m benchmarks.rounds`: contributions per second through the bare state machine, on one core.

Each case offers every contribution and asks at once whether the round closes, as a synchronizer does; a
contribution has one part. The headers of a round are made before its clock starts; what making them adds is
the figure "with headers". Live islands are given as a frozenset. Times are processor time of the process, so
that whoever shares the machine counts little; the seconds on the clock stand beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write_dated
from elastic.base.ranges import RangeSet
from elastic.policy.rounds import Contribution, Rounds, Rules

FOLDER = Path(__file__).parent / "results"
QUORUM = Rules(weights="tokens_rate", quorum=1, grace_s=math.inf, staleness_discount=0.5, max_staleness=2)
"""The rules of preset `decoupled`; a grace without end waits for all, so that the work is the same."""


@dataclass(frozen=True)
class Case:
    """One size. `rate`: contributions a second it must reach; `seconds`: what it may take in all."""

    name: str
    islands: int
    fragments: int
    steps: int
    repeats: int
    rules: Rules = field(default_factory=Rules)
    rate: float | None = None
    seconds: float | None = None


CASES = (
    Case("100 islands", 100, 16, 100, 5, rate=800_000),
    Case("100 islands, quorum", 100, 16, 100, 5, QUORUM),
    Case("10,000 islands", 10_000, 1, 1000, 1, seconds=60),
)
QUICK = (
    Case("100 islands", 100, 16, 10, 3, rate=800_000),
    Case("100 islands, quorum", 100, 16, 10, 3, QUORUM),
    Case("10,000 islands", 10_000, 1, 10, 1),
)


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results file, print the table; 1 if a bound does not hold."""
    options = parse(arguments)
    rows = []
    for case in QUICK if options.quick else CASES:
        rows.append(measure(case))
        print(f"{case.name} done", file=sys.stderr, flush=True)
    result = {
        "format": 1,
        "configuration": {"quick": options.quick, "parts": 1, "threads": 1, "machine": machine()},
        "rows": rows,
    }
    write_dated(options.results, result)
    print(json.dumps(result, indent=1) if options.json else table(rows))
    return int(not all(row["holds"] for row in rows))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps or less")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results files")
    return parser.parse_args(arguments)


def measure(case: Case) -> dict[str, Any]:
    """The figures of one case: the median of its repeats."""
    runs = [run(case) for _ in range(case.repeats)]
    contributions = case.islands * case.fragments * case.steps
    bare, whole, clock = (statistics.median(column) for column in zip(*runs, strict=True))
    rate = contributions / bare
    holds = (case.rate is None or rate >= case.rate) and (case.seconds is None or clock < case.seconds)
    rules = {name: str(value) if value == math.inf else value for name, value in asdict(case.rules).items()}
    return {
        "name": case.name,
        "islands": case.islands,
        "fragments": case.fragments,
        "steps": case.steps,
        "repeats": case.repeats,
        "rules": rules,
        "contributions": contributions,
        "per_second": round(rate),
        "per_second_with_headers": round(contributions / whole),
        "clock_seconds": round(clock, 3),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "bound": {"per_second": case.rate, "clock_seconds": case.seconds},
        "holds": holds,
    }


def run(case: Case) -> tuple[float, float, float]:
    """Processor seconds in the state machine and in all, and seconds on the clock, of `steps` outer steps."""
    islands = [f"island-{number:05d}" for number in range(case.islands)]
    live = frozenset(islands)
    rounds = Rounds(case.fragments, case.rules)
    began, clock, bare, merged = time.process_time(), time.perf_counter(), 0.0, 0
    for step in range(case.steps):
        for fragment in range(case.fragments):
            headers = [header_of(name, fragment, step) for name in islands]
            since = time.process_time()
            for header in headers:
                rounds.offer(header, 0, live, now=step)
                merge = rounds.close(fragment, live, now=step)
                if merge is not None:
                    merged += len(merge.contributions)
            bare += time.process_time() - since
    whole, passed = time.process_time() - began, time.perf_counter() - clock
    if merged != case.islands * case.fragments * case.steps:
        raise RuntimeError(f"{merged} contributions merged; some were lost")
    return bare, whole, passed


RANGES = RangeSet([(0, 16)])
"""The same for all: what the ledger makes of them is not measured."""


def header_of(island: str, fragment: int, step: int) -> Contribution:
    """What an island hands in at an outer step."""
    return Contribution(
        island=island,
        generation=1,
        fragment=fragment,
        seq=step,
        base_version=step,
        from_step=step * 50,
        to_step=step * 50 + 50,
        tokens=4096,
        steps=50,
        ranges=RANGES,
        parts=1,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| | contributions | per second | with headers | seconds | peak MB | holds |",
        "|---|" + "---|" * 6,
    ]
    lines += [
        f"| {row['name']}, {row['fragments']} fragments, {row['steps']} steps | {row['contributions']:,} "
        f"| {row['per_second']:,} | {row['per_second_with_headers']:,} | {row['clock_seconds']:.1f} "
        f"| {row['peak_mb']} | {'yes' if row['holds'] else 'no'} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
