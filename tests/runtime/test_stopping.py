"""Stopped and continued: the same versions, momentum and accounts as an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic.runtime.island_rank import IslandRank
from elastic.training.digest import digest

pytestmark = pytest.mark.unit

SEQUENCES = 192
"""A warm-up of two stretches of three steps, then six outer steps of three: 24 steps of each island."""


def _job(lab: Any) -> Any:
    return lab.job(sequences=SEQUENCES, outer={"warmup": 0.25, "codec_up": "bf16", "codec_down": "bf16"})


@pytest.fixture(scope="module")
def undisturbed(small_corpus: Any, tmp_path_factory: pytest.TempPathFactory, make_lab: Any) -> Iterator[Any]:
    """The run that every stopped and continued one is compared with."""
    lab = make_lab(tmp_path_factory.mktemp("undisturbed"))
    return lab.run(_job(lab)).finished(SEQUENCES)


def _ask(rank: IslandRank) -> None:
    rank.link.stop("test")  # type: ignore[attr-defined]


def _same(run: Any, undisturbed: Any) -> None:
    """Same values, momentum and counts; versions may be numbered apart by an early anchor."""
    for counter in ("outer_steps", "synchronous_steps", "committed_tokens", "replayed_sequences"):
        assert run.snapshot.counters[counter] == undisturbed.snapshot.counters[counter], counter
    for part in ("theta", "momentum", "published"):
        ours, theirs = getattr(run.state.states[0], part), getattr(undisturbed.state.states[0], part)
        assert digest(ours) == digest(theirs), part
    assert run.snapshot.validation["loss"] == undisturbed.snapshot.validation["loss"]


@pytest.mark.parametrize("step", [1, 2, 4, 7, 8, 9, 10, 16])
def test_stopped_anywhere_and_continued_it_is_the_same_run(lab: Any, undisturbed: Any, step: int) -> None:
    """A stop asked for before any step of one island changes nothing but when the work is done.

    Steps 1-3 and 4-6 are the stretches of the warm-up, 9 is the last of an outer period. The other
    island goes on until it hears of the stop, or must wait for the one that has left.
    """
    first = lab.run(_job(lab), tamper={"us": lab.before_step(step, _ask)})
    assert first.outcome.endings == {"eu": "stopped", "us": "stopped"}, first.outcome.errors
    _same(lab.run(_job(lab)).finished(SEQUENCES), undisturbed)


@pytest.mark.parametrize("step", [2, 4, 6, 9, 11])
def test_an_island_that_hears_of_the_stop_late_changes_nothing(lab: Any, undisturbed: Any, step: int) -> None:
    """One island has saved itself and left while the other still trains: no round closes without it."""

    def wait(rank: IslandRank) -> None:
        # In a stretch the other one may not leave before this island has taken its step.
        board = rank.link.board  # type: ignore[attr-defined]
        lab.until(lambda: board.stretch_open or "us" in board.stopped)

    tamper = {"us": lab.before_step(step, _ask), "eu": lab.before_step(step + 1, wait)}
    first = lab.run(_job(lab), tamper=tamper)
    assert first.outcome.endings == {"eu": "stopped", "us": "stopped"}, first.outcome.errors
    _same(lab.run(_job(lab)).finished(SEQUENCES), undisturbed)


def test_an_island_that_left_while_its_delta_was_merged_goes_on_with_its_lease(
    lab: Any, undisturbed: Any
) -> None:
    """One island hands in its delta, stops while it waits, and the other closes the round.

    Its checkpoint is then older than the newest version; what it had leased and not trained is still
    its own, so the deal of the data is that of an undisturbed run.
    """

    def let_the_other_leave(rank: IslandRank) -> None:
        link: Any = rank.link
        lab.until(lambda: link.board.rounds.waiting_for(0, ["us"]) == [])
        _ask(rank)
        lab.until(lambda: "us" in link.board.stopped)

    first = lab.run(_job(lab), tamper={"eu": lab.before_step(12, let_the_other_leave)})
    left = first.events("island_checkpoint")[-1]
    assert first.snapshot.version > min(
        event["version"] for event in first.events("island_checkpoint")[-2:]
    ), left
    _same(lab.run(_job(lab)).finished(SEQUENCES), undisturbed)


def test_six_outer_steps_equal_three_a_stop_and_three_more(lab: Any) -> None:
    """Momentum is part of what survives: parameters and momentum are those of six steps in one go."""
    job = lab.job(sequences=192, outer={"sync_every": 4})  # 6 outer steps x 2 islands x 4 steps x 4 sequences
    whole = lab.run(job, folder="whole").finished(192)
    assert whole.snapshot.counters["outer_steps"] == 6
    half = lab.run(job, folder="cut", stop_when=lambda view: view.version == 3)
    assert half.snapshot.version in (3, 4)
    cut = lab.run(job, folder="cut").finished(192)
    assert cut.digests == whole.digests
    assert digest(cut.state.states[0].momentum) == digest(whole.state.states[0].momentum)
    assert any(bool(value.any()) for value in cut.state.states[0].momentum.values())
    assert cut.snapshot.counters["outer_steps"] == whole.snapshot.counters["outer_steps"]


def test_a_run_stopped_before_its_first_step_starts_when_continued(lab: Any) -> None:
    """A stop that comes while islands still wait to be let in leaves a run that can be continued."""
    job = lab.job(sequences=48)

    def ask_while_waiting(rank: IslandRank) -> None:
        rank.link.stop("test")  # type: ignore[attr-defined]
        lab.until(lambda: "us" in rank.link.board.joined, 10)  # type: ignore[attr-defined]

    first = lab.run(
        job, tamper={"eu": ask_while_waiting, "us": lambda rank: None}, stop_when=lambda view: True
    )
    assert set(first.outcome.endings.values()) == {"stopped"}
    assert first.snapshot.version == 0
    lab.run(job).finished(48)


def test_stopping_twice_in_a_row_loses_nothing(lab: Any, undisturbed: Any) -> None:
    """Three lives, stopped in the warm-up and in mid-period, add up to one run."""
    lab.run(_job(lab), tamper={"us": lab.before_step(3, _ask)})
    lab.run(_job(lab), tamper={"eu": lab.before_step(8, _ask)})
    _same(lab.run(_job(lab)).finished(SEQUENCES), undisturbed)
