"""Faults under Ray: the driver killed, two drivers at once, a worker killed, a bug in the user's model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elastic.state.storage import Storage
from elastic.views.event_log import read_events

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

BUGGY_MODEL = '''
import torch


class Odd(Exception):
    """Cannot be unpickled: its constructor wants more than its arguments."""

    def __init__(self, layer, *, shape):
        super().__init__(f"{layer} cannot take {shape}")


class Model(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        if len(tokens) == 1:  # what the model is tried with at the start
            return self.table(tokens)
        raise Odd("the third layer", shape=tuple(tokens.shape))


def build(vocab_size, seq_len):
    return Model(vocab_size)
'''


def test_driver_and_worker_killed(elastic: Any, look: Any, tmp_path: Path) -> None:
    """After SIGKILL of the driver, and later of a worker, the same command trains the whole budget once.

    A second driver is refused while the first lives. A dead worker costs a restart of its island only.
    """
    run_folder, budget = tmp_path / "run", "budget.tokens=120_000"
    first = elastic.start(run_folder, budget)
    first.until_says("attempt 1 begins")
    second = elastic.train(run_folder, budget)
    assert second.ends() == 75, second.transcript()
    assert f"process {first.process.pid} on " in second.err
    assert "fix:" in second.err

    first.until_records(20)
    first.process.kill()
    assert first.ends() == -signal.SIGKILL
    assert not (run_folder / "result.json").exists()
    orphans = look.processes()

    third = elastic.start(run_folder, budget)  # at once: what the dead driver left must not be in the way
    third.until_says("island us joined")
    third.until_says("island eu joined")
    alive = {process.pid for process in look.processes()}
    left = {process.command for process in orphans if process.pid in alive}
    assert left <= {
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
    }  # these look for the dead head a minute long
    worker = next(p for p in look.processes() if p.command.startswith("ray::RayTrainWorker"))
    os.kill(worker.pid, signal.SIGKILL)
    assert third.ends() == 0, third.transcript()

    result = third.result
    assert (result["status"], result["attempt"]) == ("done", 2)
    assert result["committed_sequences"] == result["total_sequences"] == 120_000 // 32
    audit = elastic.command("audit", str(run_folder))
    assert audit.returncode == 0, audit.stdout
    events = list(read_events(Storage(run_folder)))
    assert [e["attempt"] for e in events if e["kind"] == "run_started"] == [1, 2]
    assert "\x1b" not in third.out
    assert any("a worker died" in str(e["reason"]) for e in events if e["kind"] == "island_restarting")
    assert look.left_over(60) == []


def test_a_bug_in_the_model_ends_with_its_traceback(elastic: Any, look: Any, tmp_path: Path) -> None:
    """The user's own exception, twice in the same place, ends the run: exit 1, its traceback printed last."""
    (tmp_path / "buggy_model.py").write_text(BUGGY_MODEL)
    job = tmp_path / "buggy.yaml"
    decoder = "{kind: decoder, d_model: 32, num_layers: 1, num_heads: 2}"
    job.write_text(
        elastic.job_file.read_text().replace(decoder, "{kind: python, entry: 'buggy_model:build'}")
    )
    fleet = tmp_path / "one.yaml"
    fleet.write_text("islands: [{name: us, region: us-east}]")
    driver = elastic.train(tmp_path / "run", job_file=job, fleet=fleet, folder=tmp_path)
    assert driver.ends() == 1, driver.transcript()
    lines = driver.err.rstrip().splitlines()
    assert lines[-1].endswith("Odd: the third layer cannot take (4, 32)"), driver.err
    assert any("buggy_model.py" in line and "in forward" in line for line in lines)
    assert (driver.result["status"], driver.result["exit_code"]) == ("failed", 1)
    assert look.left_over(15) == []
