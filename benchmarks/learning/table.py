"""From the figures of cells to the tables in docs/explanation/learning.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.cells import PRESETS, VARIANTS
from elastic.views.format import bytes_text

BEGIN, END = "<!-- learning: written by python -m benchmarks.learning -->", "<!-- learning: end -->"
BASELINE = "synchronous"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest over the seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(mean(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One line of a table: the cells of one label and one number of islands, over their seeds.

    `gap_percent` is paired: each seed against `synchronous` with the same seed and as many islands. The
    ratios divide the bytes of this row by those of `synchronous` for the same tokens; both are None while
    no such partner is there.
    """

    label: str
    islands: int
    seeds: tuple[int, ...]
    loss: Spread
    gap_percent: Spread | None
    outer_steps: int
    bytes_warmup: int
    bytes_after: int
    ratio_after: float | None
    ratio_whole: float | None


def rows_of(cells: Iterable[Figures]) -> list[Row]:
    """The rows of all cells that are there, in the order of the tables."""
    groups: dict[tuple[str, int], list[Figures]] = {}
    for cell in cells:
        groups.setdefault((cell["label"], cell["islands"]), []).append(cell)
    partners = {
        (cell["islands"], cell["seed"]): cell
        for (label, _), group in groups.items()
        for cell in group
        if label == BASELINE
    }
    order = {label: number for number, label in enumerate([*PRESETS, *VARIANTS])}
    keys = sorted(groups, key=lambda key: (key[1], order.get(key[0], len(order)), key[0]))
    return [_row(sorted(groups[key], key=lambda cell: cell["seed"]), partners) for key in keys]


def _row(cells: list[Figures], partners: dict[tuple[int, int], Figures]) -> Row:
    first = cells[0]
    pairs = [
        (cell, partners[cell["islands"], cell["seed"]])
        for cell in cells
        if (cell["islands"], cell["seed"]) in partners
    ]
    gaps = [100.0 * (cell["loss"] / partner["loss"] - 1.0) for cell, partner in pairs]
    after = first["bytes"] - first["bytes_warmup"]
    ratio_after = ratio_whole = None
    if pairs:
        partner = pairs[0][1]
        per_token = partner["bytes"] / partner["tokens"]
        tokens_after = first["tokens"] - first["tokens_warmup"]
        ratio_after = after / (per_token * tokens_after) if tokens_after else None
        ratio_whole = first["bytes"] / (per_token * first["tokens"])
    return Row(
        label=first["label"],
        islands=first["islands"],
        seeds=tuple(cell["seed"] for cell in cells),
        loss=Spread.of([cell["loss"] for cell in cells]),
        gap_percent=Spread.of(gaps) if gaps else None,
        outer_steps=first["outer_steps"],
        bytes_warmup=first["bytes_warmup"],
        bytes_after=after,
        ratio_after=ratio_after,
        ratio_whole=ratio_whole,
    )


# ------------------------------------------------------------------------------------------ as text

HEAD = (
    "| islands | run | seeds | validation loss | against synchronous | outer steps | bytes in warm-up "
    "| bytes after it | after warm-up | whole run |\n|---|---|---|---|---|---|---|---|---|---|"
)


def markdown(rows: Iterable[Row]) -> str:
    """A table; the last two columns are the bytes as a share of `synchronous`."""
    return "\n".join([HEAD, *(_line(row) for row in rows)])


def _line(row: Row) -> str:
    several = len(row.seeds) > 1
    loss = f"{row.loss.mean:.4f}" + (f" ({row.loss.low:.4f} to {row.loss.high:.4f})" if several else "")
    is_baseline = row.label == BASELINE
    gap = "-"
    if row.gap_percent is not None and not is_baseline:
        low, high = f"{row.gap_percent.low:+.2f}", f"{row.gap_percent.high:+.2f}"
        gap = f"{row.gap_percent.mean:+.2f} %" + (f" ({low} to {high})" if several else "")
    values = (
        row.islands,
        row.label,
        len(row.seeds),
        loss,
        gap,
        row.outer_steps or "-",
        "-" if is_baseline else bytes_text(row.bytes_warmup),
        bytes_text(row.bytes_warmup + row.bytes_after if is_baseline else row.bytes_after),
        "1" if is_baseline else _share(row.ratio_after),
        "1" if is_baseline else _share(row.ratio_whole),
    )
    return "| " + " | ".join(str(value) for value in values) + " |"


def _share(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"1/{1 / ratio:.1f}" if 0 < ratio < 0.5 else f"{ratio:.2f}"


def cross_check_table(cells: dict[str, Figures], checks: dict[str, Figures]) -> str:
    """The same cells in one process and under Ray."""
    lines = [
        "| run | islands | seed | loss in one process | loss under Ray | difference | same digest |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, check in checks.items():
        cell = cells[key]
        apart = 100.0 * (check["loss"] / cell["loss"] - 1.0)
        same = "yes" if check["digest"] == cell["digest"] else "no"
        lines.append(
            f"| {cell['label']} | {cell['islands']} | {cell['seed']} | {cell['loss']:.4f} "
            f"| {check['loss']:.4f} | {apart:+.2f} % | {same} |"
        )
    return "\n".join(lines)


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with the names of their fields."""
    return [asdict(row) for row in rows]


# -------------------------------------------------------------------------------------- on the page


def page_part(results: dict[str, Any], name: str) -> str:
    """What stands between the markers: how it was run, then the tables. `name`: of the results file."""
    configuration, cells = results["configuration"], results["cells"]
    rows = rows_of(cells.values())
    main = [row for row in rows if row.label in PRESETS]
    compared = {(row.label, row.islands) for row in rows if row.label not in PRESETS}
    islands = {count for _, count in compared}
    variants = [row for row in _of_one_seed(cells, islands) if row.label in ("diloco", "average", BASELINE)]
    variants += [row for row in rows if row.label not in PRESETS]
    parts = [_how(configuration, cells, name), markdown(main)]
    if compared:
        parts += ["One thing changed at a time, one seed:", markdown(variants)]
    if results["cross_checks"]:
        parts.append("The same cells under Ray (`elastic train`):")
        parts.append(cross_check_table(cells, results["cross_checks"]))
    return "\n\n".join(parts)


def _of_one_seed(cells: dict[str, Figures], islands: set[int]) -> list[Row]:
    """The main rows of the variants' seed and islands, so that like stands beside like."""
    seed = min((cell["seed"] for cell in cells.values() if cell["label"] not in PRESETS), default=0)
    return rows_of(cell for cell in cells.values() if cell["islands"] in islands and cell["seed"] == seed)


def _how(configuration: dict[str, Any], cells: dict[str, Figures], name: str) -> str:
    machine, job = configuration["machine"], configuration["job"]
    minutes = sum(cell["cpu_s"] for cell in cells.values()) / 60
    tokens, held_out = configuration["tokens"], configuration["corpus"]["validation_sequences"]
    return (
        f"{tokens:,} tokens a run, {job['inner']['batch_sequences']} sequences of {job['data']['seq_len']} "
        f"tokens per island and step, {held_out:,} held-out sequences; "
        f"{len(cells)} runs, {minutes:.0f} CPU minutes on {machine['cores']} cores ({machine['cpu']}), "
        f"Python {machine['python']}, torch {configuration['versions']['torch']}. "
        f"Figures and full configuration: `benchmarks/learning/results/{name}`."
    )


def write_page(path: Path, part: str) -> None:
    """Replace what is between the markers of a page. Raises ValueError when they are not there once each."""
    text = path.read_text("utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path} must hold '{BEGIN}' and after it '{END}', once each")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{part}\n\n{END}{after}", "utf-8")
