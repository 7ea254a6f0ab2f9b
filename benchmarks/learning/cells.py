"""What is compared: the cells of the table, each a job, a number of islands and a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HARNESS = (
    "outer.island_timeout_s=600",  # on a busy machine a thread may have to wait; nobody is lost here
    "validation.every=1000000",  # only the last version is judged, on everything
    "logging.tensorboard=false",
)
"""Overrides of every cell that change what it costs, not what it learns."""

SCHEDULE = {"sync_every": 20, "warmup": 0.25}
"""Of all rows that do not say otherwise: a quarter of the tokens synchronously, then H 20."""


def _row(preset: str, **outer: float | str | None) -> tuple[str, ...]:
    """Overrides of one row; nothing of the job's own `outer` section that could decide a figure is left."""
    values = {"preset": preset, **SCHEDULE, "lr": None, "momentum": None, **outer}
    return tuple(f"outer.{name}={'null' if value is None else value}" for name, value in values.items())


def _diloco(**outer: float | str | None) -> tuple[str, ...]:
    return _row("diloco", **{"lr": 0.7, "momentum": 0.8, **outer})


def _streaming(**outer: float | str | None) -> tuple[str, ...]:
    return _row("streaming", **outer)


PRESETS: dict[str, tuple[str, ...]] = {
    "synchronous": _row("synchronous", warmup=None),
    "average": _row("average"),
    "diloco": _diloco(),
    "streaming": _streaming(),
    "streaming, fp32": _streaming(codec_up="fp32", codec_down="fp32"),
}
"""Rows of the main table, as overrides of the job; `diloco` is the quickstart itself, written out."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "diloco, bf16 up and down": _diloco(codec_up="bf16", codec_down="bf16"),
    "diloco, lr 0.7, momentum 0.9": _diloco(momentum=0.9),
    "diloco, lr 0.6, momentum 0.8": _diloco(lr=0.6),
    "diloco, lr 0.8, momentum 0.8": _diloco(lr=0.8),
    "diloco, lr 0.9, momentum 0.8": _diloco(lr=0.9),
    "diloco, lr 1.0, momentum 0.5": _diloco(lr=1.0, momentum=0.5),
    "diloco, H 50": _diloco(sync_every=50),
    "diloco, warm-up 0.1": _diloco(warmup=0.1),
    "diloco, no warm-up": _diloco(warmup=0.0),
    "average, H 50": _row("average", sync_every=50),
    "average, no warm-up": _row("average", warmup=0.0),
    "streaming, int8": _streaming(codec_up="int8", codec_down="int8"),
    "streaming, e3m0": _streaming(codec_up="e3m0", codec_down="e3m0"),
    "streaming, overlap 0": _streaming(overlap_steps=0, alpha=0.0),
    "streaming, overlap 1": _streaming(overlap_steps=1),
    "streaming, overlap 5": _streaming(overlap_steps=5),
    "streaming, keep-progress": _streaming(mix="keep-progress", alpha=None),
}
"""One thing changed at a time, for orientation: two islands, the first seed."""
VARIANT_ISLANDS = 2


@dataclass(frozen=True)
class Cell:
    """One run: a row of a table, a number of islands, a seed."""

    label: str
    islands: int
    seed: int
    overrides: tuple[str, ...]
    """Of the job, without tokens and seed."""

    @property
    def key(self) -> str:
        """`label/islands/seed`, its name in the results."""
        return f"{self.label}/{self.islands}/{self.seed}"

    @property
    def is_variant(self) -> bool:
        """Whether it belongs to the second table."""
        return self.label not in PRESETS

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "overrides": list(self.overrides)}


def choose(islands: Sequence[int], seeds: Sequence[int], groups: Iterable[str]) -> list[Cell]:
    """The cells of these groups: `main`, `variants`, or labels of single rows; in the order asked for.

    Raises ValueError naming a group that does not exist.
    """
    labels: list[str] = []
    for group in groups:
        if group == "main":
            labels += PRESETS
        elif group == "variants":
            labels += VARIANTS
        elif group in PRESETS or group in VARIANTS:
            labels.append(group)
        else:
            known = ", ".join(["main", "variants", *PRESETS, *(f"'{name}'" for name in VARIANTS)])
            raise ValueError(f"no cells are called '{group}'; there are {known}")
    rows = PRESETS | VARIANTS
    chosen = []
    for seed in seeds:
        for count in islands:
            for label in dict.fromkeys(labels):
                cell = Cell(label, count, seed, rows[label])
                if not cell.is_variant or (count, seed) == (VARIANT_ISLANDS, seeds[0]):
                    chosen.append(cell)
    return chosen
