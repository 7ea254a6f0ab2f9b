"""`python -m benchmarks.learning`: run the cells that are missing, then write the table.

Each cell is a whole run of the quickstart's model in one process (`elastic.runtime.in_process`: the real
worker and synchronizer code, islands as threads). Progress goes to standard error; the tables, or with
--json everything, to standard output.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import elastic
from benchmarks.learning.cells import HARNESS, Cell, choose
from benchmarks.learning.results import FOLDER, Results, open_results
from benchmarks.learning.table import page_part, rows_of, to_json, write_page
from benchmarks.report import machine
from elastic.base.configfile import load_job
from elastic.state.storage import Storage
from elastic.training.corpus import prepare
from elastic.views.format import duration_text

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "learning.md"
TOKENS = 1_638_400
"""12,800 sequences: whole periods of 20 steps for 1, 2 and 4 islands of 8 sequences."""
QUICK_TOKENS = 81_920
COMPARABLE = {
    "status": "done",
    "islands": "islands",
    "committed_tokens": "tokens",
    "outer_steps": "outer_steps",
    "synchronous_steps": "synchronous_steps",
}
"""What a result.json must share with the cell it stands beside."""
KEPT = ("digest", "outer_steps", "synchronous_steps", "wall_s")


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 1 if a cell failed."""
    options = parse(arguments)
    corpus, configuration = prepare_all(options)
    results = open_results(options.results, configuration, datetime.date.today().isoformat())
    try:
        cells = choose(options.islands, range(options.seeds), options.cells)
        for pair in options.cross_check:
            add_cross_check(results, pair)
    except ValueError as error:
        print(f"benchmarks.learning: {error}", file=sys.stderr)
        return 2
    missing = [
        cell for cell in cells if results.cells.get(cell.key, {}).get("outer") != outer_of(cell, options)
    ]
    say(f"{results.path}: {len(cells) - len(missing)} of {len(cells)} cells are there")
    failed = run_cells(missing, results, options.workers, lambda cell: ask(cell, options, corpus))
    part = page_part(results.to_json(), results.path.name) if results.cells else ""
    if options.write_page and results.cells:
        write_page(options.page, part)
        say(f"wrote {options.page}")
    rows = rows_of(results.cells.values())
    whole = {"file": str(results.path), "rows": to_json(rows), "failed": failed, **results.to_json()}
    print(json.dumps(whole, indent=1) if options.json else part)
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; --quick fills in those that were not given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, help=f"tokens of every cell (default {TOKENS:,})")
    parser.add_argument("--seeds", type=int, help="how many seeds, from 0 (default 3)")
    parser.add_argument("--islands", type=_numbers, help="numbers of islands (default 2,4,1)")
    parser.add_argument("--cells", type=_words, help="main, variants, rows; with ; between (default all)")
    parser.add_argument("--workers", type=int, default=1, help="cells at the same time (default 1)")
    parser.add_argument("--quick", action="store_true", help="two cells of few tokens, into a temporary file")
    parser.add_argument("--write-page", action="store_true", help="put the tables into the page")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "quickstart.yaml", help="the job")
    parser.add_argument("--cache", type=Path, help="folder of the corpus (default: the user's cache)")
    parser.add_argument("--results", type=Path, help=f"folder of results files (default {FOLDER})")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page")
    parser.add_argument(
        "--cross-check",
        action="append",
        default=[],
        metavar="CELL=RUN",
        help="enter the result of a run folder beside a cell such as diloco/2/0",
    )
    options = parser.parse_args(arguments)
    quick = options.quick
    if options.cache is None:
        options.cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "elastic-islands"
    if options.results is None:
        options.results = Path(tempfile.mkdtemp(prefix="elastic-learning-")) if quick else FOLDER
    options.tokens = options.tokens or (QUICK_TOKENS if quick else TOKENS)
    options.seeds = options.seeds or (1 if quick else 3)
    options.islands = options.islands or ([2] if quick else [2, 4, 1])
    options.cells = options.cells or (["diloco", "synchronous"] if quick else ["main", "variants"])
    return options


def prepare_all(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Tokenise the corpus once; its folder, and the configuration that decides every figure."""
    job = load_job(options.job, [f"budget.tokens={options.tokens}"]).value
    info = prepare(job.data, options.cache)
    described = job.model_dump(mode="json", exclude={"outer": True, "data": {"cache_folder"}})
    configuration = {
        "job": described,
        "harness": list(HARNESS),
        "tokens": options.tokens,
        "corpus": {
            "key": info.key,
            "manifest": info.manifest_hash,
            "train_sequences": info.train.sequences,
            "validation_sequences": info.validation.sequences,
            "validation_bytes": info.validation.bytes,
        },
        "versions": {"elastic": elastic.__version__, "torch": version("torch")},
        "machine": machine(),
    }
    return options.cache / info.key, json.loads(json.dumps(configuration))


def run_cells(
    cells: list[Cell], results: Results, workers: int, run: Callable[[Cell], dict[str, Any]]
) -> dict[str, str]:
    """Run cells, `workers` at a time, and save after each; what went wrong, by key."""
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures: dict[Future[dict[str, Any]], Cell] = {pool.submit(run, cell): cell for cell in cells}
        for number, future in enumerate(as_completed(futures), start=1):
            cell = futures[future]
            try:
                figures = future.result()
            except Exception as error:  # the other cells go on; the command ends with 1
                failed[cell.key] = str(error)
                say(f"{number}/{len(cells)} {cell.key}: FAILED: {error}")
                continue
            results.cells[cell.key] = {**cell.to_json(), **figures}
            results.save()
            took = f"{duration_text(figures['wall_s'])}, {duration_text(figures['cpu_s'])} of CPU"
            say(f"{number}/{len(cells)} {cell.key}: loss {figures['loss']:.4f}, {took}")
    return failed


def outer_of(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """The outer section of a cell's job, every value filled in."""
    return load_job(options.job, [*cell.overrides, *HARNESS]).value.outer.model_dump(mode="json")


def ask(cell: Cell, options: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    """Run one cell in a process of its own. Raises RuntimeError with the end of what it said."""
    overrides = [*cell.overrides, f"budget.tokens={options.tokens}", f"seed={cell.seed}"]
    request = {"job": str(options.job), "overrides": overrides, "islands": cell.islands}
    request["corpus"] = str(corpus)
    say(f"{cell.key} begins")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.learning.measure"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout)


def add_cross_check(results: Results, pair: str) -> None:
    """Enter the result of a run folder beside a cell. Raises ValueError when they cannot be compared."""
    key, _, folder = pair.partition("=")
    if key not in results.cells:
        raise ValueError(f"--cross-check: no cell '{key}'; there are {', '.join(results.cells) or 'none'}")
    found, cell = json.loads(Storage(folder).read("result.json")), results.cells[key]
    for theirs, ours in COMPARABLE.items():
        if found[theirs] != cell.get(ours, ours):
            raise ValueError(
                f"--cross-check: {folder} is no run of {key}: "
                f"{theirs} is {found[theirs]}, not {cell.get(ours, ours)}"
            )
    check = {name: value for name, value in found.items() if name in KEPT or name.startswith("bytes_")}
    results.cross_checks[key] = {"loss": found["final_val_loss"], **check}
    results.save()


def say(text: str) -> None:
    """A line of progress."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(";") if each.strip()]


if __name__ == "__main__":
    sys.exit(main())
