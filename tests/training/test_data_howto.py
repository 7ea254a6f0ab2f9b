from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from elastic.base.config import Data

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs/howto/data.md"


def blocks(language):
    """Code blocks of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_every_yaml_block_is_a_data_section():
    """What the page shows can be copied into a job."""
    assert len(blocks("yaml")) >= 4
    for block in blocks("yaml"):
        Data.model_validate(yaml.safe_load(block)["data"])


def test_the_python_block_runs(tmp_path, monkeypatch, capsys):
    """The page's Python works on a folder of texts."""
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(f"text number {number} " * 40)
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    names: dict = {}
    exec(block, names)
    assert names["batch"].shape == (8, 33)
    assert "30 files" in capsys.readouterr().out
