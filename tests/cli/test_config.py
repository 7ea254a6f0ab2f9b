"""`elastic config`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
JOB = "name: demo\nbudget: {tokens: 1000}\ndata: {seq_len: 64}\n"
FLEET = "islands:\n  - {name: us, region: us-east}\n"
HEAVY = {"torch", "ray", "numpy", "pyarrow", "fsspec", "safetensors", "transformers", "tensorboardX"}


def elastic(
    *arguments: str, cwd: Path = ROOT, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-m", "elastic", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_checking_imports_nothing_heavy() -> None:
    """Reading a configuration touches neither torch nor ray nor arrays nor storage."""
    done = elastic("config", "check", "jobs/quickstart.yaml", flags=("-X", "importtime"))
    assert done.returncode == 0, done.stderr
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "elastic" in imported
    assert not imported & HEAVY


def test_check_says_ok_for_each_file() -> None:
    """A right job and fleet are answered with a line each and exit code 0."""
    done = elastic("config", "check", "jobs/quickstart.yaml", "--fleet", "cluster_configs/local.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "jobs/quickstart.yaml: ok\ncluster_configs/local.yaml: ok\n"


def test_mistakes_go_to_stderr_one_a_line_with_exit_code_2(tmp_path: Path) -> None:
    """Every mistake has a line `file:line:col: message`, and there is no traceback."""
    (tmp_path / "j.yaml").write_text("name: x\nlr: 1\nbudget: {tokens: -1}\n", "utf-8")
    done = elastic("config", "check", "j.yaml", "sed=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "j.yaml:2:1: unknown key 'lr'; did you mean inner.lr or outer.lr?",
        "j.yaml:3:18: budget.tokens: expected whole number > 0 (saw: -1)",
        "override 'sed=1': unknown key 'sed'; did you mean 'seed'?",
    ]


def test_check_as_json_lists_the_problems_on_stdout(tmp_path: Path) -> None:
    """A script reads `ok` and `problems`; the exit code is the same as without --json."""
    (tmp_path / "j.yaml").write_text("name: x\n", "utf-8")
    bad = elastic("config", "check", "j.yaml", "--json", cwd=tmp_path)
    assert bad.returncode == 2
    assert json.loads(bad.stdout) == {
        "ok": False,
        "problems": ["j.yaml:1:1: missing key 'budget': How much to train."],
    }
    good = elastic("config", "check", "jobs/quickstart.yaml", "--json")
    assert json.loads(good.stdout) == {"ok": True, "problems": []}


def test_a_missing_file_names_the_folder_it_was_looked_for_in(tmp_path: Path) -> None:
    """A wrong path ends in exit code 2 and says where it was looked up."""
    done = elastic("config", "check", "jobs/none.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"jobs/none.yaml:1:1: no such file (looked in {tmp_path})\n"


def test_show_prints_every_value_with_its_origin(tmp_path: Path) -> None:
    """File positions, overrides, defaults and derived values with their reason stand in aligned columns."""
    (tmp_path / "j.yaml").write_text(JOB, "utf-8")
    (tmp_path / "f.yaml").write_text(FLEET, "utf-8")
    overrides = ("inner.lr=1e-3", "fleet.islands.us.workers=[1,3]")
    done = elastic("config", "show", "j.yaml", "--fleet", "f.yaml", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    rows = {line.split()[0]: line.split(maxsplit=3)[1:] for line in lines}
    assert rows["data.seq_len"] == ["64", "file", "j.yaml:3:17"]
    assert rows["inner.lr"] == ["0.001", "override", "override 'inner.lr=1e-3'"]
    assert rows["inner.eps"] == ["1e-08", "default"]
    assert rows["run_folder"] == ["runs/demo", "derived", "runs/<name>"]
    assert rows["islands.0.workers.max"][:2] == ["3", "override"]
    assert rows["control_region"] == ["-", "derived", "the driver's own node"]


def test_show_as_json_has_the_same_facts(tmp_path: Path) -> None:
    """Each key has value, source, why and position; keys are those that overrides take."""
    (tmp_path / "j.yaml").write_text(JOB, "utf-8")
    job = json.loads(elastic("config", "show", "j.yaml", "--json", cwd=tmp_path).stdout)["job"]
    assert job["data.seq_len"] == {"value": 64, "source": "file", "why": "", "position": "j.yaml:3:17"}
    assert job["model.ffn_dim"]["source"] == "derived"


def test_schema_is_json_schema_for_both() -> None:
    """`schema job` and `schema fleet` print schemas with their required keys."""
    assert json.loads(elastic("config", "schema").stdout)["required"] == ["name", "budget"]
    assert json.loads(elastic("config", "schema", "fleet").stdout)["required"] == ["islands"]
    assert elastic("config", "schema", "fleets").returncode == 2


def test_fleet_overrides_need_a_fleet() -> None:
    """An override that nothing reads is an error."""
    done = elastic("config", "check", "jobs/quickstart.yaml", "fleet.min_islands=1")
    assert done.returncode == 2
    assert done.stderr == "override 'fleet.min_islands=1': give the fleet with --fleet\n"
