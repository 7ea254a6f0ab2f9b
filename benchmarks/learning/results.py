"""The results file: the full configuration, and the figures of every cell that is done.

The file is replaced as a whole after each cell, so an interrupted benchmark loses at most the cells that
were running. A file is continued only by a benchmark with the same configuration: another corpus, model,
budget or library starts a new file. The outer optimiser's values stand with each cell, and a cell is run
again when those that its row stands for have changed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = Path(__file__).parent / "results"


@dataclass
class Results:
    """A results file in memory; `save` writes it."""

    path: Path
    configuration: dict[str, Any]
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures by the cell's key."""
    cross_checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same cells under Ray, from the result.json of their run folders."""

    def save(self) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.to_json(), indent=1) + "\n", "utf-8")
        os.replace(beside, self.path)

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format": FORMAT,
            "configuration": self.configuration,
            "cells": self.cells,
            "cross_checks": self.cross_checks,
        }


def load(path: Path) -> Results:
    """Read a results file. Raises ValueError when it is of another format."""
    value = json.loads(path.read_text("utf-8"))
    if value.get("format") != FORMAT:
        raise ValueError(f"{path}: format {value.get('format')}, this version reads {FORMAT}")
    return Results(path, value["configuration"], value["cells"], value["cross_checks"])


def newest(folder: Path) -> Results | None:
    """The newest results file of a folder; their names begin with the date."""
    files = sorted(folder.glob("*.json"))
    return load(files[-1]) if files else None


def open_results(folder: Path, configuration: dict[str, Any], today: str) -> Results:
    """The newest file if it has this configuration, else a new one named by the date `today`."""
    last = newest(folder)
    if last is not None and last.configuration == configuration:
        return last
    path, number = folder / f"{today}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{today}-{number:02d}.json"
    return Results(path, configuration)
