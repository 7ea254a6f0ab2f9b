"""A run in one process: its deadline, its restarts, and runs full of random trouble."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.base.errors import DeadlineError
from elastic.runtime.in_process import run_in_process
from elastic.runtime.island_rank import IslandRank
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit


def test_a_run_that_hangs_ends_at_its_deadline(lab: Any) -> None:
    """An island that stands still is not waited for longer than `timeout_s`."""
    over = threading.Event()

    def stand_still(rank: IslandRank) -> None:
        over.wait(30.0)
        raise OSError("nobody hears this any more")

    with pytest.raises(DeadlineError, match="the run did not end in time"):
        run_in_process(
            lab.job(),
            lab.corpus.folder,
            Storage(lab.folder / "run"),
            ("eu",),
            tamper={"eu": lab.before_step(2, stand_still)},
            timeout_s=0.5,
        )
    over.set()


def test_an_island_is_started_again_as_often_as_allowed(lab: Any) -> None:
    """With `restarts: 2` an island that always fails is tried three times; the rest finishes without it."""

    def fail(rank: IslandRank) -> None:
        raise OSError("no such device")

    def begin(rank: IslandRank) -> None:
        rank.link.begin()  # type: ignore[attr-defined]

    run = lab.run(lab.job(sequences=48), tamper={"eu": begin, "us": fail}, restarts=2)
    run.finished(48, errors=("us",))
    assert len(run.ranks["us"]) == 3
    assert run.outcome.endings == {"eu": "done"}


def _trouble(lab: Any, name: str, chance: random.Random) -> Callable[[IslandRank], None]:
    """At a random step of each incarnation: nothing, an error, NaN, a stop, a false report of death."""

    def tamper(rank: IslandRank) -> None:
        kind = chance.choice(["none", "raise", "raise", "nan", "stop", "lost", "slow"])

        def act(rank: IslandRank) -> None:
            link: Any = rank.link
            if kind == "raise":
                raise OSError("bad luck")
            if kind == "stop":
                link.stop("bad luck")
            if kind == "lost":
                link.declare_lost(name, "bad luck")
            if kind == "nan":
                next(iter(rank.local().values()))[0, 0] = torch.nan
            if kind == "slow":
                time.sleep(0.1)

        when = lab.after_step if kind == "nan" else lab.before_step
        when(chance.randint(1, 20), act)(rank)

    return tamper


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_all_is_committed_once(lab: Any, seed: int) -> None:
    """Two lives of random trouble, then a quiet one: all positions committed once, the model finite."""
    chance = random.Random(seed)
    names = ("a", "b", "c")[: chance.choice([1, 2, 2, 3])]
    total, preset = chance.choice([33, 96, 150]), chance.choice(["diloco", "average", "synchronous"])
    outer: dict[str, Any] = {"sync_every": chance.choice([2, 3, 5])}
    if preset != "synchronous":
        outer |= {"warmup": chance.choice([0.0, 0.25, 0.5]), "codec_down": chance.choice(["fp32", "bf16"])}
    often = {"island_every": chance.choice([1, 2]), "snapshot_every": chance.choice([1, 3])}
    job = lab.job(sequences=total, preset=preset, outer=outer, checkpoint=often)
    for _ in range(2):
        tamper = {name: _trouble(lab, name, chance) for name in names}
        run = lab.run(job, names, tamper=tamper, restarts=chance.choice([0, 1, 2]))
        assert run.snapshot.failure == ""
        for error in run.outcome.errors.values():
            assert isinstance(error, OSError) or "not finite" in str(error), error
    last = lab.run(job, names).finished(total)
    assert all(bool(value.isfinite().all()) for value in last.state.states[0].theta.values())
