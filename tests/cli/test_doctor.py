"""`elastic doctor`: every judgement on machines that we do not have, and one look at a real cluster."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from elastic.base.config import ExistingCluster, Fleet, Island, LocalCluster, Workers
from elastic.cli import app, doctor, machine
from elastic.cli.machine import GIB, Check
from elastic.policy.placement import NodeRecord

unit = pytest.mark.unit
ROOT = Path(__file__).parents[2]
VERSIONS = {"elastic-islands": "0.1.0", "torch": "2.13.0", "pyarrow": "26.0.1", "ray": "2.60.1"}


def statuses(*checks: Check) -> list[str]:
    """Their statuses; whatever is not ok must say how to mend it."""
    assert all(bool(check.fix) == (check.status != "ok") for check in checks)
    return [check.status for check in checks]


@unit
def test_python_versions() -> None:
    """3.10 to 3.13 are fine."""
    seen = [machine.check_python(version) for version in ((3, 9, 9), (3, 10, 0), (3, 13, 5), (3, 14, 0))]
    assert statuses(*seen) == ["fail", "ok", "ok", "fail"]


@unit
def test_packages() -> None:
    """Missing packages fail; another series of Ray is a warning; Ray without its dashboard fails."""
    assert statuses(*machine.check_packages(VERSIONS, True)) == ["ok"] * 4
    missing = dict.fromkeys(VERSIONS)
    assert statuses(*machine.check_packages(missing, True)) == ["ok", "fail", "fail", "fail"]
    assert machine.check_packages({**VERSIONS, "ray": "2.61.0"}, True)[-1].status == "warn"
    assert "dashboard" in machine.check_packages(VERSIONS, False)[-1].saw
    extras = machine.check_extras({**dict.fromkeys(machine.EXTRAS), "tiktoken": "0.14"})
    assert "tiktoken 0.14" in extras.saw
    assert "s3fs absent (extra s3)" in extras.saw


@unit
def test_the_series_of_ray_is_that_of_the_project() -> None:
    """doctor judges by the same release that pyproject.toml pins."""
    pinned = re.search(r'"ray\[default,train\]>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert pinned[1] == machine.RAY_SERIES


@unit
def test_hardware() -> None:
    """Container limits, memory, shared memory and disks that are too small are warnings with a fix."""
    assert statuses(
        machine.check_cpus(8, 8, None), machine.check_cpus(64, 64, 3.5), machine.check_cpus(64, 4, None)
    ) == ["ok", "warn", "warn"]
    assert "--num-cpus 3" in machine.check_cpus(64, 64, 3.5).fix
    assert statuses(machine.check_memory(8 * GIB, 2, 2), machine.check_memory(4 * GIB, 2, 2)) == [
        "ok",
        "warn",
    ]
    shm = [machine.check_shm(size) for size in (2 * GIB, 64 * 2**20, None)]
    assert statuses(*shm) == ["ok", "warn", "warn"]
    assert "--shm-size" in shm[1].fix
    disks = [
        machine.check_disk("disk", Path("/x"), total, free)
        for total, free in ((100 * GIB, 50 * GIB), (100 * GIB, 4 * GIB), (1000 * GIB, 40 * GIB))
    ]
    assert statuses(*disks) == ["ok", "warn", "warn"]
    assert statuses(machine.check_open_files(1024), machine.check_open_files(-1)) == ["warn", "ok"]


@unit
def test_devices() -> None:
    """A torch that cannot be imported fails; a driver that torch cannot use is a warning."""
    cpu = {"torch": "2.13.0+cpu", "devices": []}
    gpu = {"name": "H200", "memory_bytes": 150 * 10**9, "bf16": True}
    seen = [
        machine.check_devices(None, "ImportError: libtorch", False),
        machine.check_devices(cpu, "", False),
        machine.check_devices(cpu, "", True),
        machine.check_devices({"torch": "2.13.0", "devices": [gpu, {**gpu, "bf16": False}]}, "", True),
    ]
    assert statuses(*seen) == ["fail", "ok", "warn", "ok"]
    assert seen[3].saw == "H200 150 GB, H200 150 GB no bf16"


@unit
def test_system_settings(tmp_path: Path) -> None:
    """Clock, locale, host name, write probe and authentication."""
    good = 1_800_000_000.0
    assert statuses(machine.check_clock(good), machine.check_clock(0.0)) == ["ok", "warn"]
    assert statuses(machine.check_locale("UTF-8"), machine.check_locale("ANSI_X3.4-1968")) == ["ok", "warn"]
    seen = machine.check_hostname("h", "10.0.0.1"), machine.check_hostname("h", None)
    assert statuses(*seen) == ["ok", "warn"]
    now = (tmp_path / "x").write_text("x") and (tmp_path / "x").stat().st_mtime
    probes = [
        machine.check_write(tmp_path, now),
        machine.check_write(tmp_path, now - 3600),
        machine.check_write(tmp_path / "not there", now),
    ]
    assert statuses(*probes) == ["ok", "warn", "fail"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@unit
@pytest.mark.parametrize(
    ("mode", "token", "existing", "status"),
    [
        (None, False, False, "ok"), (None, False, True, "warn"), ("token", True, True, "ok"),
        ("disabled", False, False, "ok"), ("disabled", True, True, "warn"), ("none", True, False, "warn"),
    ],
)  # fmt: skip
def test_authentication(mode: str | None, token: bool, existing: bool, status: str) -> None:
    """Open ports of a real cluster and a missing token are pointed out."""
    assert statuses(machine.check_auth(mode, token, existing)) == [status]


# ----------------------------------------------------------------------------------------- fleet


def fleet(*islands: Island, cluster: LocalCluster | ExistingCluster | None = None) -> Fleet:
    """An existing cluster unless told otherwise."""
    return Fleet(islands=list(islands), cluster=cluster or ExistingCluster(kind="existing"))


def island(name: str, low: int = 1, high: int = 1, region: str | None = None) -> Island:
    """An island of CPU workers."""
    return Island(name=name, region=region or name, workers=Workers(min=low, max=high))


def node(name: str, region: str, cpus: float, **more: object) -> NodeRecord:
    """A node of a region with its custom resource."""
    resources = {"CPU": cpus, f"region_{region}": 1.0}
    labels = {"ray.io/region": region}
    fields = {"resources": resources, "available": resources, "labels": labels, **more}
    return NodeRecord(node_id=name, **fields)  # type: ignore[arg-type]


@unit
def test_islands_that_fit() -> None:
    """Regions are counted by label, and each island's workers against its own region."""
    checks = doctor.fleet_checks(
        fleet(island("us", 1, 2), island("eu")), [node("a", "us", 2), node("b", "eu", 1), node("c", "eu", 1)]
    )
    assert statuses(*checks) == ["ok", "ok", "ok"]
    assert [check.saw for check in checks] == [
        "eu: 2 nodes, us: 1 node",
        "2 of 1 to 2 workers fit now",
        "1 of 1 to 1 workers fit now",
    ]


@unit
def test_islands_that_never_fit() -> None:
    """Too few CPUs, a missing label or a missing custom resource fail; with an autoscaler they may come."""
    small = [node("a", "us", 2)]
    unlabelled = [NodeRecord(node_id="a", resources={"CPU": 9.0}, available={"CPU": 9.0})]
    plain = [node("a", "us", 9, resources={"CPU": 9.0}, available={"CPU": 9.0})]
    for nodes in (small, unlabelled, plain):
        checks = doctor.fleet_checks(fleet(island("us", 4, 4)), nodes)
        assert statuses(*checks)[1:] == ["fail"]
    growing = fleet(island("us", 4, 4), cluster=ExistingCluster(kind="existing", autoscaling=True))
    assert statuses(*doctor.fleet_checks(growing, small))[1:] == ["warn"]
    busy = [node("a", "us", 9, available={"CPU": 1.0, "region_us": 1.0})]
    (_, check) = doctor.fleet_checks(fleet(island("us", 4, 4)), busy)
    assert statuses(check) == ["warn"]
    assert statuses(*doctor.fleet_checks(fleet(island("us")), [])) == ["fail", "fail"]


@unit
def test_a_local_fleet_shares_this_machine() -> None:
    """More workers than CPUs work, slowly."""
    islands = [island("us", 2, 2), island("eu", 1, 4)]
    assert statuses(doctor.check_local_cpus(islands, 3), doctor.check_local_cpus(islands, 2)) == [
        "ok",
        "warn",
    ]


@unit
def test_which_cluster_is_meant() -> None:
    """The fleet decides; `auto` and no fleet follow RAY_ADDRESS."""
    there, given = {"RAY_ADDRESS": "10.0.0.1:6379"}, ExistingCluster(kind="existing", address="h:1")
    assert doctor.cluster_address(None, {}) is None
    assert doctor.cluster_address(None, there) == "10.0.0.1:6379"
    assert doctor.cluster_address(fleet(island("us"), cluster=LocalCluster()), there) is None
    assert doctor.cluster_address(fleet(island("us")), there) == "10.0.0.1:6379"
    assert doctor.cluster_address(fleet(island("us")), {}) == "auto"
    assert doctor.cluster_address(fleet(island("us"), cluster=given), there) == "h:1"


# --------------------------------------------------------------------------------------- command


@unit
def test_a_probe_that_hangs_or_crashes_ends_with_its_deadline() -> None:
    """doctor itself never hangs, and quotes the last line of what went wrong."""
    assert doctor.probe(["devices"], 0.01) == (None, "no answer within 0.01 s")
    answer, problem = doctor.probe([], 60)
    assert answer is None
    assert "IndexError" in problem


def answer_of(arguments: list[str], deadline_s: float) -> tuple[dict | None, str]:
    """A machine with CPUs and no cluster."""
    return (
        ({"torch": "2.13.0", "devices": []}, "")
        if arguments == ["devices"]
        else (None, "ConnectionError: no")
    )


@unit
def test_the_report_and_its_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """Every trouble has its fix below it; a failed check is exit code 1, warnings are 0."""
    monkeypatch.setattr(doctor, "probe", answer_of)
    monkeypatch.setattr(
        doctor, "machine_checks", lambda islands, workers: [Check("disk", "warn", "1 GB", "tidy")]
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "doctor") == 0
    assert capsys.readouterr().out.splitlines() == [
        "warn  disk           1 GB",
        "                     fix: tidy",
        "ok    devices        CPU only (torch 2.13.0)",
        "ok    RAY_AUTH_MODE  token",
        "2 ok, 1 warn, 0 fail",
    ]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert call(monkeypatch, "doctor", "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["checks"][-1]["name"] == "ray cluster"
    assert answer["checks"][-1]["saw"] == "10.0.0.1:6379: ConnectionError: no"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


@unit
def test_a_wrong_fleet_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """A fleet file with a mistake ends before anything is looked at."""
    path = tmp_path / "fleet.yaml"
    path.write_text("islandz: []\n")
    assert call(monkeypatch, "doctor", "--fleet", str(path)) == 2
    assert "islandz" in capsys.readouterr().err


@unit
def test_this_machine_can_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All checks run here, each has a name and something it saw, and nothing is left in the folder."""
    monkeypatch.chdir(tmp_path)
    checks = machine.machine_checks(islands=2, workers=2)
    statuses(*checks)
    assert all(check.name and check.saw for check in checks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_a_real_cluster_is_judged_by_its_labels() -> None:
    """Nodes, labels and resources of a running Ray reach the judgement; a dead address fails."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)
        cluster.add_node(
            num_cpus=2, labels={"ray.io/region": "us"}, resources={"region_us": 1},
            object_store_memory=100 * 2**20,
        )  # fmt: skip
        answer, problem = doctor.probe(["cluster", cluster.address], 60)
        assert answer is not None, problem
        nodes = [NodeRecord(**fields) for fields in answer["nodes"]]
        checks = doctor.fleet_checks(fleet(island("us", 1, 2), island("eu")), nodes)
        assert statuses(*checks) == ["ok", "ok", "fail"]
        assert checks[1].saw == "2 of 1 to 2 workers fit now"
    finally:
        cluster.shutdown()
