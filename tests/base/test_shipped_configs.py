"""The jobs and fleets that come with the project are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.base.configfile import load_both, load_fleet, load_job
from elastic.base.errors import ConfigError

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
FLEETS = sorted((ROOT / "cluster_configs").glob("*.yaml"))


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda path: path.stem)
def test_every_fleet_fits_the_quickstart(fleet: Path) -> None:
    """Each fleet loads, and the quickstart job can run on it."""
    job, loaded = load_both(ROOT / "jobs" / "quickstart.yaml", fleet)
    assert job.value.name == "quickstart"
    assert len(loaded.value.islands) == 2


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_every_job_lacks_nothing_but_what_is_the_users(job: Path, tmp_path: Path, monkeypatch) -> None:
    """A job names a bucket and a tokenizer file of the user's; nothing else may be wrong with it."""
    monkeypatch.chdir(tmp_path)
    try:
        load_job(job)
    except ConfigError as error:
        others = [p for p in error.problems if "tokenizers/" not in p and "needs the package" not in p]
        assert others == []


@pytest.mark.parametrize(
    "job", [path for path in JOBS if path.stem != "quickstart"], ids=lambda path: path.stem
)
def test_every_big_job_states_what_it_takes(job: Path) -> None:
    """The header says hardware, tokens, time and cost, before the first key."""
    header = job.read_text("utf-8").split("\nname:")[0]
    for word in ("parameters", "tokens", "compute", "hardware", "time", "cost", "assumption"):
        assert word in header


def test_the_local_fleet_needs_no_more_than_two_cpus() -> None:
    """Two islands of one worker: what a laptop has."""
    islands = load_fleet(ROOT / "cluster_configs" / "local.yaml").value.islands
    assert sum(island.workers.max * island.cpus_per_worker for island in islands) == 2
    assert len({island.region for island in islands}) == 2
