"""Numbers and foreign text as people read them: bytes, counts, durations, one clean line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def number(value: object) -> float | None:
    """`value` as a float, None if it is no number; events spell non-finite numbers as strings."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def integer(value: object, default: int = 0) -> int:
    """`value` as an int, `default` if it is no finite number."""
    found = number(value)
    return default if found is None or not math.isfinite(found) else int(found)


def _scaled(value: float, units: Sequence[str], whole_from: float) -> str:
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value /= 1000.0
        step += 1
    digits = 1 if step and abs(value) < whole_from - 0.05 else 0
    return f"{value:.{digits}f}{units[step]}"


def bytes_text(num_bytes: float) -> str:
    """`12_345_678` is `12 MB`, `1_234_567` is `1.2 MB`; decimal units."""
    return _scaled(num_bytes, (" B", " kB", " MB", " GB", " TB", " PB"), 10.0)


def count_text(count: float) -> str:
    """`21_345` is `21.3k`."""
    return _scaled(count, ("", "k", "M", "G", "T"), 100.0)


def duration_text(seconds: float) -> str:
    """`190` is `3m10s`; two units at most."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def loss_text(loss: float | None) -> str:
    """Two decimals on a line; `-` if unknown, `nan` if it is."""
    return "-" if loss is None else f"{loss:.2f}"


def plural(count: float, word: str) -> str:
    """`1 worker`, `2 workers`, `39,000 sequences`."""
    return f"{count:,.0f} {word}" + ("" if count == 1 else "s")


def one_line(value: object, limit: int = 400) -> str:
    """Foreign text (a reason, a traceback) as one line without control characters, at most `limit` long."""
    text = " ".join(_CONTROL.sub(" ", _ESCAPES.sub("", str(value))).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
