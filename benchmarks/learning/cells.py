"""What is compared: the cells of the table, each a job, a number of islands and a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PRESETS: dict[str, tuple[str, ...]] = {
    "diloco": ("outer.preset=diloco",),
    "synchronous": ("outer.preset=synchronous", "outer.warmup=null"),
    "average": ("outer.preset=average",),
}
"""Rows of the main table, as overrides of the job."""

_DILOCO, _AVERAGE = PRESETS["diloco"], PRESETS["average"]
VARIANTS: dict[str, tuple[str, ...]] = {
    "diloco, bf16 up and down": (*_DILOCO, "outer.codec_up=bf16", "outer.codec_down=bf16"),
    "diloco, lr 0.8, momentum 0.5": (*_DILOCO, "outer.lr=0.8", "outer.momentum=0.5"),
    "diloco, lr 0.6, momentum 0.9": (*_DILOCO, "outer.lr=0.6"),
    "diloco, lr 1.0, momentum 0.5": (*_DILOCO, "outer.lr=1.0", "outer.momentum=0.5"),
    "diloco, H 50": (*_DILOCO, "outer.sync_every=50"),
    "diloco, warm-up 0.1": (*_DILOCO, "outer.warmup=0.1"),
    "diloco, no warm-up": (*_DILOCO, "outer.warmup=0.0"),
    "average, H 50": (*_AVERAGE, "outer.sync_every=50"),
    "average, no warm-up": (*_AVERAGE, "outer.warmup=0.0"),
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
