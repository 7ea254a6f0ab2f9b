"""`python -m benchmarks.merge`: how fast a synchronizer shard merges, against memory bandwidth.

M int4 contributions to 64 MB of fp32 parameters in matrices of 512 columns are merged (weighted mean) and
taken as an outer step (Nesterov); a second row publishes the step as an int4 packet too. One thread. Speeds
are GB/s of fp32 parameters, and as a share of a plain `copy_` of the same bytes in the same run. Each M runs
in a process of its own. Memory is the most that the process held beyond an empty one: the state (theta,
momentum, published: 12 bytes per parameter), the contributions, and what merging takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.merge.measure import CODEC, COLUMNS, MATRICES, ROWS, measure
from benchmarks.report import machine, write_dated

FOLDER = Path(__file__).parent / "results"
ISLANDS = (2, 4, 8, 16)
BOUND = {"islands": 8, "ratio": 0.065, "aim": 0.085}
"""Of merge and step, as a share of `copy_`."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results file, print the table; 1 if the bound does not hold where it should."""
    options = parse(arguments)
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for islands in options.islands:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            rows += pool.submit(measure, islands, options.repeats).result()
        print(f"{islands} contributions done", file=sys.stderr, flush=True)
    result = {
        "format": 1,
        "configuration": {
            "codec": CODEC,
            "parameters": MATRICES * ROWS * COLUMNS,
            "columns": COLUMNS,
            "matrices": MATRICES,
            "threads": 1,
            "repeats": options.repeats,
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "machine": machine(),
        },
        "bound": {**BOUND, "holds": holds(rows)},
        "rows": rows,
    }
    write_dated(options.results, result)
    print(json.dumps(result, indent=1) if options.json else table(rows))
    # Without AVX-512 the kernels are others: say so, and do not fail.
    strict = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return int(strict and holds(rows) is False)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 contributions only, 3 repeats")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results files")
    options = parser.parse_args(arguments)
    options.islands, options.repeats = ((8,), 3) if options.quick else (ISLANDS, 5)
    return options


def holds(rows: list[dict[str, Any]]) -> bool | None:
    """Whether the bound holds; None if its row was not measured."""
    ratios = [
        row["ratio"] for row in rows if row["islands"] == BOUND["islands"] and row["what"] == "merge + step"
    ]
    return ratios[0] >= BOUND["ratio"] if ratios else None


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| M | | GB/s | of `copy_` | bytes per parameter |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['islands']} | {row['what']} | {row['gb_per_s']:.2f} | {row['ratio']:.3f} "
        f"| {row['peak_bytes_per_parameter'] or 'unknown'} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
