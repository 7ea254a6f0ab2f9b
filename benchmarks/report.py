"""What every benchmark says of where it ran, and how it leaves its figures behind."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_dated(folder: Path, result: Mapping[str, Any], path: Path | None = None) -> Path:
    """Write a result as JSON into `folder`, named by the day, or to `path`; returns where it is."""
    path = path or folder / f"{datetime.date.today().isoformat()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return path


def machine() -> dict[str, Any]:
    """What the cells ran on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
