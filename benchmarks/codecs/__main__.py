"""`python -m benchmarks.codecs`: how fast one core encodes and decodes, against a plain copy.

Normal values in rows of 512 columns. `encode` is what packing a delta calls, memory for the result included;
`decode_into` is what merging and adopting call. Speeds are GB/s of fp32 input, and a share of `copy_` of the
same values: encode, decode and copy take turns, so that all three see the machine in the same state. The
error is the relative L2 error of the decoded values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine, write_dated
from elastic.training.block_codec import BLOCK
from elastic.training.codec import Codec, decode, decode_into, encode, nbytes

FOLDER = Path(__file__).parent / "results"
CODECS: tuple[Codec, ...] = ("bf16", "int8", "int4", "e3m0")
COLUMNS = 512
REPEATS = 7
BOUNDS = {
    "int8": {"encode": 0.35, "decode": 0.85},
    "int4": {"encode": 0.28, "decode": 0.45},
    "e3m0": {"encode": 0.20, "decode": 0.33},
}
"""Shares of `copy_`, at least."""
AIMS = {
    "int8": {"encode": 0.50, "decode": 1.1},
    "int4": {"encode": 0.45, "decode": 0.65},
    "e3m0": {"encode": 0.30, "decode": 0.50},
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results file, print the table; 1 if a bound does not hold where it should."""
    options = parse(arguments)
    torch.set_num_threads(1)
    rows = [row for codec in CODECS for row in measure(codec, options.mb, options.repeats)]
    result = {
        "format": 1,
        "configuration": {
            "megabytes": options.mb,
            "columns": COLUMNS,
            "block": BLOCK,
            "values": "normal, seed 0",
            "threads": 1,
            "repeats": options.repeats,
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "machine": machine(),
        },
        "rows": rows,
    }
    write_dated(options.results, result, options.out)
    print(json.dumps(result, indent=1) if options.json else table(rows))
    # Without AVX-512 the kernels are others: say so in the file, and do not fail.
    strict = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return int(strict and any(row["holds"] is False for row in rows))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=64, help="megabytes (2**20) of fp32 input")
    parser.add_argument("--quick", action="store_true", help="3 repeats")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the results files")
    parser.add_argument("--out", type=Path, help="write this file instead of a dated one")
    options = parser.parse_args(arguments)
    options.repeats = 3 if options.quick else REPEATS
    return options


def measure(codec: Codec, megabytes: float, repeats: int) -> list[dict[str, Any]]:
    """The rows of one codec: encode and decode."""
    shape = (max(1, int(megabytes * 2**20) // (4 * COLUMNS)), COLUMNS)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    encoded, out = encode(codec, values), torch.empty(shape)
    error = float((decode(codec, encoded, shape) - values).norm() / values.norm())
    copied, *taken = _medians(
        [
            lambda: out.copy_(values),
            lambda: encode(codec, values),
            lambda: decode_into(codec, encoded, out),
        ],
        repeats,
    )
    rows = []
    for what, seconds in zip(("encode", "decode"), taken, strict=True):
        ratio, bound = copied / seconds, BOUNDS.get(codec, {}).get(what)
        rows.append(
            {
                "codec": codec,
                "what": what,
                "gb_per_s": round(values.nbytes / seconds / 1e9, 2),
                "copy_gb_per_s": round(values.nbytes / copied / 1e9, 2),
                "ratio": round(ratio, 3),
                "bound": bound,
                "aim": AIMS.get(codec, {}).get(what),
                "holds": None if bound is None else ratio >= bound,
                "bytes_per_value": round(nbytes(codec, shape) / values.numel(), 4),
                "relative_error": round(error, 5),
            }
        )
    return rows


def _medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each call; they take turns, after one round that does not count."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| codec | | GB/s | of `copy_` | bound | aim | bytes a value | relative error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['codec']} | {row['what']} | {row['gb_per_s']:.2f} | {row['ratio']:.2f} "
        f"| {row['bound'] or ''}{' MISSED' if row['holds'] is False else ''} | {row['aim'] or ''} "
        f"| {row['bytes_per_value']:.3f} | {row['relative_error']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
