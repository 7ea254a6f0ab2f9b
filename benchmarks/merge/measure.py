"""Merge, step and publish for one number of contributions, in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastic.training.codec import Codec, encode
from elastic.training.merge import Encoded, merge
from elastic.training.outer import OuterState

CODEC: Codec = "int4"
COLUMNS = 512
ROWS = 2048
MATRICES = 16
LR, MOMENTUM = 0.4, 0.9


def measure(islands: int, repeats: int) -> list[dict[str, Any]]:
    """Both rows of one number of contributions, in a fresh process."""
    torch.set_num_threads(1)
    shapes = {f"layer{number}": (ROWS, COLUMNS) for number in range(MATRICES)}
    parameters = MATRICES * ROWS * COLUMNS
    empty = _status_bytes("VmRSS")
    generator = torch.Generator().manual_seed(islands)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.01

    state = OuterState({name: draw(shape) for name, shape in shapes.items()})
    contributions = [
        Encoded(CODEC, [{name: (0, encode(CODEC, draw(shape), name)) for name, shape in shapes.items()}])
        for _ in range(islands)
    ]
    weights = [1 / islands] * islands

    def step() -> None:
        state.step(merge(contributions, weights, shapes), LR, MOMENTUM)

    def step_and_publish() -> None:
        step()
        state.publish(CODEC)

    peaks = [_peak_bytes(work) for work in (step, step_and_publish)]
    source = {name: draw(shape) for name, shape in shapes.items()}
    target = {name: torch.empty_like(value) for name, value in source.items()}

    def copy() -> None:
        for name, value in source.items():
            target[name].copy_(value)

    rows = []
    for what, work, peak in zip(("step", "step + publish"), (step, step_and_publish), peaks, strict=True):
        copied, taken = _medians([copy, work], repeats)
        rows.append(
            {
                "what": f"merge + {what}",
                "islands": islands,
                "seconds": round(taken, 5),
                "copy_seconds": round(copied, 5),
                "gb_per_s": round(4 * parameters / taken / 1e9, 3),
                "copy_gb_per_s": round(4 * parameters / copied / 1e9, 3),
                "ratio": round(copied / taken, 4),
                "peak_bytes_per_parameter": round((peak - empty) / parameters, 2) if peak and empty else None,
            }
        )
    return rows


def _medians(works: list[Callable[[], None]], repeats: int) -> list[float]:
    """Seconds of each, taken in turn so that all see the same machine."""
    taken: list[list[float]] = [[] for _ in works]
    for number in range(repeats + 1):
        for work, seconds in zip(works, taken, strict=True):
            began = time.perf_counter()
            work()
            if number:  # the first warms up
                seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in taken]


def _peak_bytes(work: Callable[[], None]) -> int | None:
    """The most memory the process held during `work`; None where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        return None
    work()
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
