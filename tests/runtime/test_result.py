"""result.json: what it holds, and that it can always be read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from elastic.runtime.result import Result, read_result
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit

FIELDS = [
    "status", "exit_code", "reason", "run", "run_folder", "attempt", "islands", "outer_steps",
    "synchronous_steps", "committed_sequences", "total_sequences", "committed_tokens",
    "replayed_sequences", "bytes_up", "bytes_down", "bytes_up_warmup", "bytes_down_warmup",
    "final_val_loss", "final_val_nats_per_byte", "validation_bytes", "versions", "digest", "hours",
    "cost", "wall_s", "started", "ended",
]  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """All fields, by their stable names, in their order."""
    storage = Storage(tmp_path)
    assert read_result(storage) is None
    result = Result(status="stopped", exit_code=75, reason="max_hours", versions=[7], cost=1.5)
    result.write(storage)
    there = read_result(storage)
    assert there == result.to_json()
    assert list(there) == FIELDS


def test_a_later_result_replaces_the_earlier(tmp_path: Path) -> None:
    """The file says what the last attempt came to."""
    storage = Storage(tmp_path)
    Result(status="stopped", exit_code=143).write(storage)
    Result(status="done", exit_code=0).write(storage)
    assert read_result(storage)["status"] == "done"  # type: ignore[index]


def test_a_loss_that_is_not_a_number_does_not_break_the_file(tmp_path: Path) -> None:
    """NaN is no JSON: it is written as the word, so that every reader can read the rest."""
    storage = Storage(tmp_path)
    Result(status="failed", exit_code=1, final_val_loss=math.nan).write(storage)
    text = storage.read("result.json").decode()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word))["final_val_loss"] == "nan"
