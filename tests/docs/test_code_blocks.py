"""Code blocks of README and docs do what they show.

`python` runs (with `norun` behind the language it is only compiled), `yaml` loads as the job or fleet it is a
part of, and in `sh` every `elastic` command parses and every `make` target exists.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from elastic.base.config import Fleet, Job
from elastic.base.configfile import load_fleet, load_job
from elastic.base.errors import ConfigError
from elastic.cli.app import app

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)
THE_USERS_OWN = ("no such file or folder", "needs the package", "no Python module")


def blocks(*languages: str) -> list:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text("utf-8") if path.exists() else ""
        for match in FENCE.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                label = f"{path.relative_to(ROOT)}:{line}"
                found.append(pytest.param(match[3], match[2].strip(), id=label))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone to work in, with a folder `texts/` of one's own, as the docs assume."""
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text number {number} " * 40, "utf-8")
    for name in ("jobs", "cluster_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("code", "flags"), blocks("python"))
def test_python_runs(code: str, flags: str, folder: Path) -> None:
    """A Python block runs as it stands, in a clone."""
    compile(code, "block", "exec")
    if "norun" not in flags:
        command = [sys.executable, "-c", code]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("text", "flags"), blocks("yaml"))
def test_yaml_loads(text: str, flags: str, folder: Path) -> None:
    """A YAML block is a job or fleet, or a part of one; other YAML is at least well-formed."""
    data = yaml.safe_load(text)
    path = folder / "block.yaml"
    keys = set(data) if isinstance(data, dict) else set()
    if "islands" in keys or keys <= Fleet.model_fields.keys() - Job.model_fields.keys():
        path.write_text(text if "islands" in keys else text + "\nislands: [{name: us, region: r}]\n", "utf-8")
        load_fleet(path)
    elif keys <= Job.model_fields.keys():
        missing = "" if "name" in keys else "\nname: block\n"
        missing += "" if "budget" in keys else "\nbudget: {tokens: 1000}\n"
        path.write_text(text + missing, "utf-8")
        assert problems_of_ours(path) == []


def problems_of_ours(job: Path) -> list[str]:
    """What is wrong with a job apart from files and packages that only its reader has."""
    try:
        load_job(job)
    except ConfigError as error:
        return [problem for problem in error.problems if not any(own in problem for own in THE_USERS_OWN)]
    return []


@pytest.mark.parametrize(("text", "flags"), blocks("sh", "bash", "console"))
def test_commands_exist(text: str, flags: str) -> None:
    """Every `elastic` command has a verb and options that exist; every `make` target is in the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        for at, word in enumerate(words):
            is_verb = at == 0 or words[at - 1] in ("-m", "--") or words[at - 1].endswith("=")
            if is_verb and word in ("elastic", ".venv/bin/elastic"):
                parse(words[at + 1 :])


def parse(arguments: list[str]) -> None:
    """Parse a command line of `elastic` without carrying it out; wrong usage raises."""
    command = typer.main.get_command(app)
    context = None
    while True:
        if "--help" in arguments[:1] or "--version" in arguments[:1]:
            return
        context = command.make_context(command.name or "elastic", list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        _, command, arguments = command.resolve_command(context, rest)


def test_wrong_commands_are_noticed() -> None:
    """The parser used above refuses a verb, an option and a missing argument."""
    parse(["config", "check", "jobs/x.yaml", "--fleet", "f.yaml", "a=b", "--json"])
    for wrong in (["trian", "x"], ["train", "x", "--flet", "y"], ["audit"], ["config", "chekc", "x"]):
        with pytest.raises(Exception, match=r"No such|Missing") as caught:
            parse(wrong)
        assert type(caught.value).__name__ in (
            "UsageError",
            "NoSuchOption",
            "NoSuchCommand",
            "MissingParameter",
        )
