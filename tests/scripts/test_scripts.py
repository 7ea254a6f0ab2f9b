"""The project's own checks hold what they promise."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["reference_docs.py", "events_page.py"])
def test_reference_pages_are_current(name: str) -> None:
    """docs/reference says what the models and the catalogue of events say."""
    done = script(name, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_module_sizes_are_checked() -> None:
    """No module is too long to read in one sitting."""
    done = script("module_sizes.py")
    assert done.returncode == 0, done.stdout
    assert "modules," in done.stdout


def test_every_test_states_its_property() -> None:
    """A test without a docstring does not say what must hold."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []
