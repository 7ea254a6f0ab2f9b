"""The reference page of events says what the catalogue says."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.base.events import KINDS

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    """Run scripts/events_page.py after changing the catalogue."""
    command = [sys.executable, str(ROOT / "scripts" / "events_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_field_has_a_meaning_and_no_other_has() -> None:
    """A new field needs a sentence; a field that is gone leaves none behind."""
    meanings = runpy.run_path(str(ROOT / "scripts" / "events_page.py"))["MEANINGS"]
    assert set(meanings) == {field for kind in KINDS.values() for field in kind.fields}
