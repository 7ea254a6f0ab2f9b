"""`elastic status` and `elastic report` as commands: what they print, and their exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic.base.events import KINDS
from elastic.cli import app
from elastic.cli.status import REFRESH_S, changes
from elastic.state import layout
from elastic.state.run_file import write_run
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog
from elastic.views.status import StatusReader

pytestmark = pytest.mark.unit


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run that has begun."""
    storage = Storage(tmp_path / "run")
    write_run(storage, {"run": "quick-1a2b", "job": {"name": "quick"}, "seq_len": 256})
    fields = {"run": "quick-1a2b", "attempt": 1, "epoch": 1, "continued": False, "versions": [0]}
    with EventLog(storage, "controller-a1") as log:
        log.emit("run_started", fields)
    return storage


def end(storage: Storage, status: str = "done", exit_code: int = 0) -> None:
    """The run ends."""
    result = {"status": status, "exit_code": exit_code, "reason": "", "attempt": 1}
    storage.write(layout.RESULT_FILE, json.dumps(result).encode())


def outer_step(storage: Storage, version: int) -> None:
    """Somebody writes an outer step into the folder."""
    fields = dict.fromkeys(KINDS["outer_step"].fields)
    fields |= {"version": version, "fragment": 0, "committed_sequences": version, "total_sequences": 10}
    with EventLog(storage, "synchronizer-a1") as log:
        log.emit("outer_step", fields)


def test_status_prints_text_or_json(storage: Storage, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Both forms say the same, and reading a status is exit code 0 whatever became of the run."""
    end(storage, "failed", 1)
    assert call(monkeypatch, "status", storage.url) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"run        quick-1a2b in {storage.url}",
        "state      failed, attempt 1, exit code 1",
    ]
    assert call(monkeypatch, "status", storage.url, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["exit_code"]) == ("failed", 1)


def test_a_wrong_run_is_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The message says where it looked, what is missing and what to give."""
    for verb in (["status"], ["status", "--watch"], ["status", "--json"]):
        assert call(monkeypatch, *verb, str(tmp_path / "typo")) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == (
            f"{tmp_path / 'typo'}: no run here (saw: run.json is not there)\n"
            "  fix: give the run folder of a job: its run_folder, or runs/<job name>\n"
        )


def test_a_run_that_prepares_its_first_data_has_a_status(tmp_path: Path, monkeypatch, capsys) -> None:
    """Before run.json is there, the lock and the events already tell how far the corpus is."""
    storage = Storage(tmp_path / "run")
    storage.create(layout.lock_name(1), b"{}")
    with EventLog(storage, "controller-a1") as log:
        log.emit("data_progress", {"stage": "tokenising", "done": 5e6, "total": 20e6, "unit": "bytes"})
    assert call(monkeypatch, "status", storage.url) == 0
    assert "data       tokenising 5.0 MB of 20 MB (25%)" in capsys.readouterr().out.splitlines()


def test_watching_tells_changes_until_the_run_ends(storage: Storage) -> None:
    """One status for each change, none while nothing happens, and the last one is the end."""
    script = iter([lambda: None, lambda: outer_step(storage, 1), lambda: None, lambda: end(storage)])
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        next(script)()

    seen = [(status.state, status.versions) for status in changes(StatusReader(storage), sleep)]
    assert seen == [("running", []), ("running", [1]), ("done", [1])]
    assert waits == [REFRESH_S] * 4


@pytest.mark.parametrize("as_json", [False, True])
def test_watching_off_a_terminal_prints_lines(storage: Storage, monkeypatch, capsys, as_json: bool) -> None:
    """A watch of a run that is over prints it once and returns."""
    end(storage)
    assert call(monkeypatch, "status", storage.url, "--watch", *(["--json"] if as_json else [])) == 0
    (line,) = capsys.readouterr().out.splitlines()
    if as_json:
        assert json.loads(line)["state"] == "done"
    else:
        assert line == "quick-1a2b done | attempt 1 | 0% | outer v0 | no islands | exit code 0"


def test_report_prints_where_it_wrote(storage: Storage, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The files named are there; a folder without a run is exit code 2."""
    pytest.importorskip("matplotlib")
    assert call(monkeypatch, "report", storage.url, "--json") == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [Path(name).is_file() for name in files] == [True, True]
    assert call(monkeypatch, "report", storage.url + "x") == 2
    assert "no run here" in capsys.readouterr().err


def test_report_without_its_extra_is_exit_code_2(storage: Storage, monkeypatch, capsys) -> None:
    """The message names the extra; there is no traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(monkeypatch, "report", storage.url) == 2
    assert "pip install 'elastic-islands[report]'" in capsys.readouterr().err
