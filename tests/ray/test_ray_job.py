"""`ray job submit` as the README writes it, on a cluster of three nodes, with Ray's own command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 400
RAY = Path(sys.executable).with_name("ray")
OURS = ("SynchronizerActor", "IslandActor", "TrainController", "RayTrainWorker", "PlacementGroupCleaner")

CLUSTER = """
import socket, sys
from ray.cluster_utils import Cluster

def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

cluster = Cluster()
port = free_port()
cluster.add_node(
    num_cpus=1, include_dashboard=True, dashboard_port=port, dashboard_agent_listen_port=free_port()
)
for region in ("us-east", "eu-west"):
    resources = {f"region_{region}": 1000}
    cluster.add_node(num_cpus=3, labels={"ray.io/region": region}, resources=resources)
print(f"http://127.0.0.1:{port}", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclass
class Cluster:
    """A running cluster and the address of its dashboard."""

    url: str

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of Ray's."""
        return subprocess.run(
            [str(RAY), "job", *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "RAY_ADDRESS": self.url},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def submit(self, job: str, *overrides: str, run_folder: str, wait: bool = True) -> Any:
        """The README's command, with a job id, a run folder, and what makes the job small."""
        command = readme_command()
        command[command.index("--address") + 1] = self.url
        options = ["--submission-id", job, *([] if wait else ["--no-wait"])]
        command = [word for word in command if not word.startswith("run_folder=")]
        assert command[:3] == ["ray", "job", "submit"]
        return self.ray("submit", *options, *command[3:], f"run_folder={run_folder}", *overrides)

    def info(self, job: str) -> dict[str, Any]:
        """How a job stands, and the exit code of its driver."""
        details = JobSubmissionClient(self.url).get_job_info(job)
        return {"status": details.status.value, "code": details.driver_exit_code}

    def logs(self, job: str) -> str:
        """What the job has printed."""
        return JobSubmissionClient(self.url).get_job_logs(job)

    def until_over(self, job: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while (info := self.info(job))["status"] in ("PENDING", "RUNNING"):
            assert time.monotonic() < deadline, self.logs(job)
            time.sleep(0.5)
        return info


def readme_command() -> list[str]:
    """The words of the README's `ray job submit`."""
    text = (REPOSITORY / "README.md").read_text("utf-8")
    [command] = re.findall(r"^ray job submit [^\\\n]*(?:\\\n[^\\\n]*)+", text, re.MULTILINE)
    return shlex.split(command.replace("\\\n", " "))


@pytest.fixture(scope="module")
def cluster(shared_ray_home: Path) -> Iterator[Cluster]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env={**os.environ, "PATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Cluster(process.stdout.readline().strip())
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()


@pytest.fixture
def small(corpus: Path) -> list[str]:
    """Overrides that fit the README's job and fleet to this machine."""
    islands = [
        f"fleet.islands.{name}.{key}"
        for name in ("us", "eu")
        for key in ("cpus_per_worker=1", "gpus_per_worker=0")
    ]
    return [
        *islands,
        *("fleet.islands.us.workers=2", "fleet.islands.eu.workers=1", "fleet.min_islands=2"),
        *("model.d_model=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2"),
        *(f"data.sources=[{corpus}]", "data.seq_len=32", "budget.tokens=60_000", "logging.every_s=1"),
        *("inner.batch_sequences=4", "outer.sync_every=5", "validation.sequences=8"),
    ]


def test_submit_stop_and_continue(
    cluster: Cluster, elastic: Any, look: Any, small: list[str], tmp_path: Path, shared_ray_home: Path
) -> None:
    """`ray job stop` leaves a resumable run and no actor; the same submission continues it to SUCCEEDED."""
    run_folder = tmp_path / "run"
    submitted = cluster.submit("first", *small, run_folder=str(run_folder), wait=False)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    deadline = time.monotonic() + PATIENCE_S
    while len(list(run_folder.glob("state/*.json"))) < 8:
        assert cluster.info("first")["status"] in ("PENDING", "RUNNING"), cluster.logs("first")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped = cluster.ray("stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert cluster.until_over("first")["status"] == "STOPPED"
    result = json.loads((run_folder / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("stopped", 143)
    assert "SIGTERM" in result["reason"]
    deadline = time.monotonic() + 20
    while left := [p for p in look.processes() if any(name in p.command for name in OURS)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)

    continued = cluster.submit("second", *small, run_folder=str(run_folder))
    assert continued.returncode == 0, continued.stdout + continued.stderr
    logs = cluster.logs("second")
    assert "run done, exit code 0" in cluster.ray("logs", "second").stdout
    assert cluster.until_over("second")["status"] == "SUCCEEDED"
    assert "run done, exit code 0" in logs
    assert "island us joined: generation" in logs
    assert "2 workers on cpu" in logs
    assert "\x1b" not in logs
    result = json.loads((run_folder / "result.json").read_text())
    assert (result["status"], result["attempt"], result["islands"]) == ("done", 2, 2)
    assert result["committed_sequences"] == result["total_sequences"] == 60_000 // 32
    audit = elastic.command("audit", str(run_folder))
    assert audit.returncode == 0, audit.stdout

    [package] = {p.name: p for p in shared_ray_home.glob("**/working_dir_files/*/") if p.is_dir()}.values()
    there = {path.name for path in package.iterdir()}
    assert {"elastic", "jobs", "cluster_configs"} <= there
    assert there & {".git", ".venv", "runs"} == set()


def test_what_a_job_cannot_do_fails_at_once(cluster: Cluster, small: list[str], tmp_path: Path) -> None:
    """A relative run folder is exit 2, more workers than the cluster can hold exit 3; both name the fix."""
    relative = cluster.submit("relative", *small, run_folder="runs/first")
    assert relative.returncode == 1
    assert cluster.until_over("relative") == {"status": "FAILED", "code": 2}
    logs = cluster.logs("relative")
    assert "run_folder" in logs
    assert "fix: give an absolute path" in logs

    small.remove("fleet.islands.us.workers=2")
    many = cluster.submit("many", *small, "fleet.islands.us.workers=4", run_folder=str(tmp_path / "many"))
    assert many.returncode == 1
    assert cluster.until_over("many") == {"status": "FAILED", "code": 3}, cluster.logs("many")
    logs = cluster.logs("many")
    assert "island us wants 4 x 1 CPU with ray.io/region=us-east" in logs
    assert "fix: lower workers" in logs
