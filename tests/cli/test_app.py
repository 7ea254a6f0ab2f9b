"""The command line as a whole: help, wrong usage, and how errors end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic.base.errors import ConfigError, PlacementError, ResumableError
from elastic.cli import app

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
VERBS = ["train", "status", "audit", "report", "export", "doctor", "config"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["elastic", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        app.main()
    return int(caught.value.code or 0)


def test_help_names_every_verb_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """One line for each verb, and what each exit code means."""
    assert run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    for word in [*VERBS, "75 stopped; the same command goes on", "3 the cluster can never hold"]:
        assert word in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys, verb: str) -> None:
    """`elastic VERB --help` works without importing what the verb needs."""
    assert run(monkeypatch, verb, "--help") == 0
    assert verb in capsys.readouterr().out


def test_unknown_verbs_and_options_are_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A misspelt verb gets a suggestion and exit code 2."""
    assert run(monkeypatch, "trian") == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert run(monkeypatch, "status", "runs/x", "--wach") == 2
    assert "--watch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError(["a:1:1: x", "b"]), 2, "a:1:1: x\nb\n"),
        (PlacementError("no room", fix="less"), 3, "no room\n  fix: less\n"),
        (ResumableError("stopped"), 75, "stopped\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_become_exit_codes_without_traceback(monkeypatch, capsys, error, code: int, text: str) -> None:
    """Whatever a verb raises on purpose is printed as it is, and ends with its own code."""
    monkeypatch.setattr(app, "app", _raises(error))
    assert run(monkeypatch) == code
    assert capsys.readouterr().err == text


def test_a_bug_ends_with_its_traceback_last(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """An unexpected exception exits 1, and the last line names it."""
    monkeypatch.setattr(app, "app", _raises(ZeroDivisionError("oh")))
    assert run(monkeypatch) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ZeroDivisionError: oh"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`elastic config schema | head` ends quietly."""
    command = f"{sys.executable} -m elastic config schema | head -n 1"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_train_without_a_fleet_says_how_to_give_one(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Away from the project there is no default fleet, and the message names the option."""
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "train", "job.yaml") == 2
    assert capsys.readouterr().err.startswith("no fleet: give --fleet FLEET")


def _raises(error: BaseException):
    def call(**_: object) -> None:
        raise error

    return call
