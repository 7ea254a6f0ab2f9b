"""What cannot work is refused in seconds, before Ray starts, with exit code 2 and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("inner.lerning_rate=1e-3", ["inner.lerning_rate", "lr"]),
        ("data.sources=[missing/corpus.txt]", ["missing/corpus.txt"]),
        ("data.sources=[EMPTY]", ["data.sources: empty corpus", "fix:"]),
        ("data.sources=[TABLE]", ["'text'", "body"]),
        ("run_folder", ["/file", "fix:"]),
    ],
)
def test_bad_input_is_refused_before_ray(
    elastic: Any, look: Any, ray_home: Path, tmp_path: Path, override: str, names: list[str]
) -> None:
    """A misspelt key, a missing file, an empty corpus, a missing column, an unwritable run folder: exit 2."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "empty.txt").write_text("")
    pq.write_table(pa.table({"body": ["some text"] * 100}), tmp_path / "table.parquet")
    (tmp_path / "file").write_text("a file where a folder is wanted")
    run_folder = tmp_path / ("file/run" if override.startswith("run_folder") else "run")
    for word, name in (("EMPTY", "empty.txt"), ("TABLE", "table.parquet")):
        override = override.replace(word, str(tmp_path / name))
    driver = elastic.train(run_folder, *([override] if "=" in override else []))
    assert driver.ends() == 2, driver.transcript()
    for name in names:
        assert name in driver.err, driver.transcript()
    assert "Traceback" not in driver.err
    assert look.processes() == []
    assert not (ray_home / "ray").exists()


def test_a_relative_run_folder_under_a_ray_job_is_refused(
    elastic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each submission would begin a new run: exit 2, and the fix is an absolute path or a bucket."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    driver = elastic.train(Path("runs/relative"))
    assert driver.ends() == 2, driver.transcript()
    assert "fix: give an absolute path" in driver.err
