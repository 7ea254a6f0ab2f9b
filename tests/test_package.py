"""The package itself: public names without imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic

pytestmark = pytest.mark.unit


def test_importing_elastic_imports_nothing_else() -> None:
    """`import elastic` is instant; names are fetched when used."""
    code = "import sys, elastic; heavy = {'ray', 'torch', 'pydantic'}; "
    code += "print(heavy & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_public_names() -> None:
    """All public names are listed, unknown ones are refused as Python does."""
    assert dir(elastic) == ["Fleet", "Job", "Result", "load_fleet", "load_job", "plan", "train"]
    assert elastic.load_job.__module__ == "elastic.base.configfile"
    assert elastic.Job.__name__ == "Job"
    with pytest.raises(AttributeError, match="no attribute 'jobs'"):
        _ = elastic.jobs
