"""`elastic train` on the local fleet: an undisturbed run, and one that is stopped again and again."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.state.storage import Storage
from elastic.views.event_log import read_events

CORE_WARNING = re.compile(r"\[[\d-]+ [\d:,]+ W \d+ \d+\] (rpc|gcs)_client\.(h|cc):")
"""A line of Ray's core on stderr, about a head that does not answer."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]


@dataclass
class Undisturbed:
    """A finished run, and its processes while it trained."""

    driver: Any
    trained: list[Any]
    left: list[Any]
    events: list[dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(
    shared_ray_home: Path, elastic: Any, look: Any, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    driver = elastic.start(tmp_path_factory.mktemp("undisturbed") / "run")
    driver.until_records(2)
    trained = look.processes()
    assert driver.ends() == 0, driver.transcript()
    return Undisturbed(driver, trained, look.left_over(15), list(read_events(Storage(driver.run_folder))))


def test_a_run_ends_with_a_result_that_the_folder_proves(undisturbed: Undisturbed, elastic: Any) -> None:
    """result.json, `elastic status` and `elastic audit` tell the same story of a finished run."""
    driver, result = undisturbed.driver, undisturbed.driver.result
    assert (result["status"], result["exit_code"], result["attempt"]) == ("done", 0, 1)
    assert (result["islands"], result["replayed_sequences"]) == (2, 0)
    assert result["committed_sequences"] == result["total_sequences"] == 60_000 // 32
    assert result["outer_steps"] >= 20
    assert result["synchronous_steps"] > 0
    assert result["bytes_up"] > result["bytes_up_warmup"] > 0
    assert result["bytes_down"] > result["bytes_down_warmup"] > 0
    assert result["final_val_nats_per_byte"] < 2.5

    audit = elastic.command("audit", str(driver.run_folder))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    status = json.loads(elastic.command("status", str(driver.run_folder), "--json").stdout)
    for key in ("committed_sequences", "total_sequences", "outer_steps", "bytes_up", "versions"):
        assert status[key] == result[key], key
    assert f"elastic audit {driver.run_folder}" in driver.out


def test_islands_start_from_the_same_parameters(undisturbed: Undisturbed) -> None:
    """Both islands join with one digest of version 0."""
    joined = [e for e in undisturbed.events if e["kind"] == "island_joined" and e["version"] == 0]
    assert sorted(e["island"] for e in joined) == ["eu", "us"]
    assert len({e["digest"] for e in joined}) == 1


def test_islands_live_in_their_regions(undisturbed: Undisturbed) -> None:
    """The island's actor, its Ray Train controller and its workers are on a node with the region's label."""
    by_parent: dict[int, list[str]] = {}
    for process in undisturbed.trained:
        by_parent.setdefault(process.parent, []).append(process.command.split(" ")[0])
    for region in ("us-east", "eu-west"):
        [raylet] = [p for p in undisturbed.trained if "/raylet " in p.command and region in p.command]
        names = by_parent[raylet.pid]
        for name in ("ray::IslandActor.run", "ray::TrainController.run", "ray::RayTrainWorker"):
            assert names.count(name) == 1, (region, names)


def test_nothing_is_left_behind(undisturbed: Undisturbed) -> None:
    """After the end no process remains, no folder of Ray Train in the run folder, and no token in HOME."""
    assert undisturbed.left == []
    assert not (Path.home() / ".ray").exists()
    assert not list(undisturbed.driver.run_folder.glob("islands/*/ray"))


def test_output_off_a_terminal_is_plain(undisturbed: Undisturbed) -> None:
    """No colours, no lines of Ray's own, nothing on stderr."""
    assert "\x1b" not in undisturbed.driver.out
    assert undisturbed.driver.err == ""


def test_a_finished_run_is_not_run_again(undisturbed: Undisturbed, elastic: Any, look: Any) -> None:
    """The same command on a finished run says so, exits 0 and keeps result.json."""
    before = undisturbed.driver.result
    again = elastic.train(undisturbed.driver.run_folder)
    assert again.ends() == 0, again.transcript()
    assert "nothing to do" in again.out
    assert again.result == before


def test_stopped_twice_it_comes_to_the_same_parameters(
    undisturbed: Undisturbed, elastic: Any, look: Any, tmp_path: Path
) -> None:
    """Ctrl-C exits 130, `max_hours` 75; continued, the run ends with the undisturbed run's digest."""
    run_folder = tmp_path / "run"
    driver = elastic.start(run_folder)
    driver.until_records(20)
    driver.send(signal.SIGINT)
    assert driver.ends() == 130, driver.transcript()
    stopped = driver.result
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 130)
    assert 0 < stopped["committed_sequences"] < stopped["total_sequences"]
    assert "SIGINT" in stopped["reason"]
    assert look.left_over(15) == []
    assert driver.err == ""

    driver = elastic.train(run_folder, "budget.max_hours=1e-6")
    assert driver.ends() == 75, driver.transcript()
    assert (driver.result["status"], driver.result["attempt"]) == ("stopped", 2)
    assert "max_hours" in driver.result["reason"]

    driver = elastic.train(run_folder)
    assert driver.ends() == 0, driver.transcript()
    expected = undisturbed.driver.result
    for key in ("digest", "committed_sequences", "replayed_sequences", "final_val_loss"):
        assert driver.result[key] == expected[key], key
    assert driver.result["attempt"] == 3
    assert elastic.command("audit", str(run_folder)).returncode == 0


def test_a_signal_while_ray_starts_ends_soon(
    shared_ray_home: Path, elastic: Any, look: Any, tmp_path: Path
) -> None:
    """SIGTERM before there is a cluster ends the run as stopped, with nothing left."""
    driver = elastic.start(tmp_path / "run")
    driver.until_says("attempt 1 begins")
    driver.send(signal.SIGTERM)
    assert driver.ends() == 143, driver.transcript()
    assert "placing" not in driver.out
    assert (driver.result["status"], driver.result["exit_code"]) == ("stopped", 143)
    assert look.left_over(15) == []
    # The signal may end Ray's head while the driver talks to it: Ray's core then warns that it is away.
    assert [line for line in driver.err.splitlines() if not CORE_WARNING.match(line)] == []


def test_two_runs_at_once_on_one_host(shared_ray_home: Path, elastic: Any, look: Any, tmp_path: Path) -> None:
    """Each has a Ray of its own; a signal while islands are placed ends one and not the other."""
    one, other = elastic.start(tmp_path / "one"), elastic.start(tmp_path / "other")
    one.until_says("placing 1 worker in region eu-west")
    one.send(signal.SIGINT)
    assert one.ends() == 130, one.transcript()
    other.until_says("placing 1 worker in region eu-west")
    assert other.process.poll() is None, other.transcript()
    other.send(signal.SIGTERM)
    assert other.ends() == 143, other.transcript()
    assert [driver.result["status"] for driver in (one, other)] == ["stopped", "stopped"]
    assert [driver.err for driver in (one, other)] == ["", ""]
    assert look.left_over(15) == []
