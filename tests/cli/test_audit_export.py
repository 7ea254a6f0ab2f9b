"""`elastic audit` and `elastic export`: what they print, as text and as JSON, and how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.base.errors import RunFolderError
from elastic.cli.audit import WIDTH, audit_command, audit_text
from elastic.cli.export import export_command, export_text
from elastic.state.audit import Audit
from elastic.state.audit_records import Check
from elastic.state.export import Exported
from elastic.state.run_file import write_run
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit


def test_a_passed_audit_is_one_line_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sound run ends without an exception, that is with exit code 0."""
    write_run(Storage(tmp_path), {"run": "run-1"})
    audit_command(str(tmp_path))
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "ok    run file  run run-1, hash right",
        "ok    records   none yet: nothing is committed",
        f"{tmp_path}: all checks passed",
    ]


def test_a_failed_audit_exits_with_1_and_says_which_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An altered byte ends in exit code 1; the JSON has the same checks."""
    write_run(Storage(tmp_path), {"run": "run-1"})
    data = bytearray((tmp_path / "run.json").read_bytes())
    data[10] ^= 1
    (tmp_path / "run.json").write_bytes(bytes(data))
    with pytest.raises(SystemExit) as ended:
        audit_command(str(tmp_path))
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "FAIL  run file" in out
    assert "1 of 2 checks failed" in out
    with pytest.raises(SystemExit):
        audit_command(str(tmp_path), json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["run_folder"] == str(tmp_path)
    assert [(check["name"], check["ok"]) for check in found["checks"]] == [
        ("run file", False),
        ("records", True),
    ]
    assert "run.json" in found["checks"][0]["detail"]


def test_a_long_reason_is_wrapped_not_cut() -> None:
    """Every word of a failure is printed, within the width, under its column."""
    detail = " ".join(f"word{number}" for number in range(60))
    lines = audit_text(Audit("runs/a", [Check("records", False, detail), Check("run file", True, "fine")]))
    assert " ".join(" ".join(lines[:-2]).split()).endswith(detail)
    assert all(len(line) <= WIDTH for line in lines)


def test_a_wrong_folder_is_an_error_not_a_failed_audit(tmp_path: Path) -> None:
    """No run there: exit code 2, as for any wrong argument."""
    for command in (lambda: audit_command(str(tmp_path)), lambda: export_command(str(tmp_path), "out")):
        with pytest.raises(RunFolderError) as failure:
            command()
        assert failure.value.exit_code == 2


def test_export_says_what_it_wrote_and_how_to_load_it() -> None:
    """Folder, version, files, notes and the line to load it."""
    exported = Exported("/x/out", "run-1", 12, "theta", 1_234_567, True, ["config.json"], ["a note"])
    assert export_text(exported) == [
        "/x/out: version 12 of run run-1, 1 234 567 parameters",
        "  config.json",
        "note: a note",
        "load it: transformers.AutoModelForCausalLM.from_pretrained('/x/out')",
    ]
    assert exported.to_json()["parameters"] == "theta"
