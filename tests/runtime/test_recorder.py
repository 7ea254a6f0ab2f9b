"""What the synchronizer tells: the catalogue's events, beats at a bounded rate, time and cost."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.base.ranges import RangeSet
from elastic.exchange.link import Beat, Member
from elastic.runtime.board import EVENTS_KEPT, Board
from elastic.runtime.recorder import PROGRESS_EVERY_S, Recorder

pytestmark = pytest.mark.unit

US = Member("us", 1, 0, 1)


def _beat(step: int) -> Beat:
    return Beat(step, 2.0, 0.1, 1.0, 64, 10.0, 0.0, "outer")


@pytest.fixture
def board(lab: Any) -> Board:
    """A board of two islands with prices, one of them joined."""
    setup = lab.setup(lab.job(), prices={"eu": 3.6, "us": 7.2})
    made = Board(setup, [0], "outer", RangeSet(), {})
    made.membership.join("us", 0.0)
    made.workers["us"] = 2
    return made


def test_progress_is_told_at_a_bounded_rate(lab: Any, board: Board) -> None:
    """Every beat is on the board; an event comes at most every few seconds, and never before a step."""
    recorder = Recorder(board, lab)
    for now, step in ((0.0, 0), (1.0, 1), (1.5, 2), (1.0 + PROGRESS_EVERY_S, 3)):
        recorder.progress(US, _beat(step), now)
        assert board.beats["us"].step == step
    assert [fields["step"] for kind, fields in lab.facts if kind == "island_progress"] == [1, 3]


def test_only_islands_that_take_part_cost(lab: Any, board: Board) -> None:
    """Two workers at 7.2 an hour for ten minutes; the island that has not joined costs nothing."""
    counters = {"wall_s": 100.0, "cost": 1.0}
    Recorder(board, lab).account(600.0, counters)
    assert counters["wall_s"] == 700.0
    assert counters["cost"] == pytest.approx(1.0 + 2 * 7.2 / 6)
    board.membership.leave("us", 1)
    Recorder(board, lab).account(600.0, counters)
    assert counters["cost"] == pytest.approx(1.0 + 2 * 7.2 / 6)


def test_a_fact_that_the_catalogue_does_not_know_is_refused(lab: Any, board: Board) -> None:
    """A misspelt field does not vanish in silence."""
    with pytest.raises(ValueError, match="unknown fields"):
        Recorder(board, lab).emit("warning", {"wat": "x"})


def test_old_events_are_let_go(lab: Any, board: Board) -> None:
    """The controller finds the newest events even if it has not looked for long; memory is bounded."""
    recorder = Recorder(board, lab)
    for number in range(EVENTS_KEPT + 5):
        recorder.warn(str(number))
    cursor, events = recorder.since(0)
    assert cursor == EVENTS_KEPT + 5
    assert len(events) == EVENTS_KEPT
    assert events[-1]["what"] == str(EVENTS_KEPT + 4)
