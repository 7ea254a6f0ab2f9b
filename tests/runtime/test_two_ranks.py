"""An island of two FSDP ranks: it gives its rows, adopts its rows, and equals an island of one rank."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import elastic
from elastic.state.records import load_records
from elastic.state.replay import load_outer
from elastic.state.storage import Storage

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]

SEQUENCES = 55
"""A warm-up of three steps, then three outer steps."""
SCRIPT = Path(__file__).parent / "two_ranks.py"


def _job(lab: Any) -> Any:
    # A batch of 5 is 3 and 2 for two ranks; the last one is not full. Rows of 257 x 16 are cut unevenly.
    return lab.job(sequences=SEQUENCES, outer={"warmup": 0.3}, inner={"batch_sequences": 5, "lr": 0.01})


@pytest.fixture(scope="module")
def lives(make_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All scenarios, in processes of their own: their answers by name, and the lab they belong to."""
    folder = tmp_path_factory.mktemp("two")
    lab = make_lab(folder)
    job, corpus = _job(lab).model_dump(mode="json"), str(lab.corpus.folder)
    requests = [{"scenario": "agree", "out": str(folder / "agree")}]
    for name, more in (("whole", {}), ("stopped", {"stop_at": 2}), ("fenced", {"fence": True})):
        about = {"scenario": "run", "job": job, "corpus": corpus, "run": str(folder / f"run-{name}")}
        requests.append({**about, **more, "out": str(folder / name)})
    (folder / "requests.json").write_text(json.dumps(requests))
    root = str(Path(elastic.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, str(SCRIPT), str(folder / "requests.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    answers = {r["out"].rpartition("/")[2]: pickle.loads(Path(r["out"]).read_bytes()) for r in requests}
    return lab, answers


@pytest.fixture(scope="module")
def alone(lives: Any) -> Any:
    """The same job on one rank, here."""
    lab, _ = lives
    return lab.run(_job(lab), ("eu",), folder="alone").finished(SEQUENCES)


def _theta(folder: Path) -> dict[str, Tensor]:
    storage = Storage(folder)
    return load_outer(storage, load_records(storage)).theta


def _worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def test_two_ranks_equal_one(lives: Any, alone: Any) -> None:
    """Warm-up, anchors and outer steps by two ranks give the parameters of one rank, within 1e-5."""
    lab, answers = lives
    whole = answers["whole"]
    assert (whole["codes"], whole["endings"], whole["finished"]) == ([0, 0], ["done", "done"], True)
    for counter in ("outer_steps", "synchronous_steps", "committed_tokens"):
        assert whole["counters"][counter] == alone.snapshot.counters[counter]
    assert _worst(_theta(lab.folder / "run-whole"), alone.state.states[0].theta) <= 1e-5
    assert whole["validation"]["loss"] == pytest.approx(alone.snapshot.validation["loss"], abs=1e-5)


def test_the_ranks_send_each_row_once(lives: Any, alone: Any) -> None:
    """Two ranks send as many bytes up as one; each fetches the whole version for itself."""
    _, answers = lives
    counters = answers["whole"]["counters"]
    assert counters["bytes_up"] == alone.snapshot.counters["bytes_up"]
    assert counters["bytes_down"] == 2 * alone.snapshot.counters["bytes_down"]


def test_a_run_of_two_ranks_continues_with_one(lives: Any, alone: Any) -> None:
    """Stopped with two ranks, continued with one: its checkpoint is cut anew, the result is the same."""
    lab, answers = lives
    stopped = answers["stopped"]
    assert (stopped["codes"], stopped["endings"]) == ([0, 0], ["stopped", "stopped"])
    assert (stopped["version"], stopped["finished"]) == (2, False)
    run = lab.run(_job(lab), ("eu",), folder="run-stopped").finished(SEQUENCES)
    assert run.snapshot.counters["outer_steps"] == alone.snapshot.counters["outer_steps"]
    assert _worst(run.state.states[0].theta, alone.state.states[0].theta) <= 1e-5


def test_ranks_that_are_fenced_apart_join_together(lives: Any) -> None:
    """Only rank 1 hears that its island was given up: both join again, and no data is lost or doubled."""
    lab, answers = lives
    fenced = answers["fenced"]
    assert (fenced["codes"], fenced["endings"], fenced["finished"]) == ([0, 0], ["done", "done"], True)
    records = load_records(Storage(lab.folder / "run-fenced")).records
    assert records[-1].body["generations"] == {"eu": 2}
    committed = sorted(tuple(pair) for record in records for pair in record.body.get("committed", []))
    assert sum(stop - start for start, stop in committed) == SEQUENCES
    assert all(before[1] <= after[0] for before, after in pairwise(committed))


def test_ranks_agree_on_what_rank_0_decides(lives: Any) -> None:
    """`Group.share` gives both ranks rank 0's answer; its exception ends neither in a collective."""
    _, answers = lives
    zero, one = answers["agree"]
    assert zero["shared"] == one["shared"] == {"asked": 0, "list": [1, None, "é"]}
    assert zero["failed"] == ("KeyError", "'lease 7'")
    assert one["failed"] == ("RuntimeError", "rank 0 failed: KeyError: 'lease 7'")
    assert zero["not json"][0] == "TypeError"
    assert one["not json"][0] == "RuntimeError"
    assert zero["after"] == one["after"] == "still together"


def test_sums_wrap_around_and_leave_their_input_alone(lives: Any) -> None:
    """`Group.sum` of int64 wraps as digests need, and does not write into what it was given."""
    _, answers = lives
    zero, one = answers["agree"]
    assert zero["sum"] == one["sum"] == [-2, 3]
    assert (zero["kept"], one["kept"]) == ([2**63 - 1, 1], [2**63 - 1, 2])
