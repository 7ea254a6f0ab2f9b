"""Progress of a run, folded from events: late, foreign and repeated facts never make it wrong."""

from __future__ import annotations

import pytest

from elastic.base.events import KINDS, make_event
from elastic.views.event_log import Event
from elastic.views.format import bytes_text, count_text, duration_text, integer, number, one_line, plural
from elastic.views.progress import Progress, TimeLeft

pytestmark = pytest.mark.unit


def event(kind: str, **fields: object) -> Event:
    """An event; fields that are not given are None."""
    return make_event(kind, "w", 0, 0.0, {**dict.fromkeys(KINDS[kind].fields), **fields})


def step(island: str, generation: int, number_: int) -> Event:
    """An island says where it is."""
    return event("island_progress", island=island, generation=generation, step=number_, tokens_per_s=100.0)


def test_an_older_generation_does_not_speak_for_its_island() -> None:
    """A zombie's progress, loss or farewell changes nothing once a newer incarnation has joined."""
    progress = Progress()
    progress.update(event("island_joined", island="us", generation=2, workers=1, resumed_step=40))
    progress.update(step("us", 1, 99))
    progress.update(event("island_lost", island="us", generation=1, reason="timeout", returned_sequences=0))
    progress.update(event("island_left", island="us", generation=1, reason="done"))
    us = progress.islands["us"]
    assert (us.state, us.step, us.generation) == ("running", 40, 2)


def test_an_island_goes_through_its_states() -> None:
    """Placed, running, lost, restarting, running again with a new generation, left."""
    progress, seen = Progress(), []
    for fact in (
        event("island_starting", island="us", region="r", workers=1),
        event("island_joined", island="us", generation=1, workers=2, version=0),
        event("island_lost", island="us", generation=1),
        event("island_restarting", island="us", delay_s=1.0),
        event("island_joined", island="us", generation=2, workers=1, version=[3, 4]),
        event("island_left", island="us", generation=2),
    ):
        progress.update(fact)
        us = progress.islands["us"]
        seen.append((us.state, us.workers, us.version))
    assert seen == [
        ("starting", 0, None), ("running", 2, 0), ("lost", 0, 0), ("restarting", 0, 0),
        ("running", 1, 4), ("left", 0, 4),
    ]  # fmt: skip


def test_a_lost_island_trains_no_more() -> None:
    """A progress event of the same generation that comes late does not bring the island back."""
    progress = Progress()
    progress.update(event("island_joined", island="us", generation=1, workers=1))
    progress.update(event("island_lost", island="us", generation=1))
    progress.update(step("us", 1, 5))
    assert progress.tokens_per_s == 0.0
    assert progress.running == []


def test_an_island_that_joined_before_we_looked_is_known_from_its_progress() -> None:
    """A reader of the newest events only still sees every island that trains."""
    progress = Progress()
    progress.update(step("us", 3, 5))
    assert progress.running[0].generation == 3
    assert progress.tokens_per_s == 100.0


def test_a_new_attempt_ends_the_islands_of_the_old_one() -> None:
    """After a killed driver nothing counts as running until it joins again; counters stay."""
    progress = Progress()
    progress.update(event("run_started", run="r", attempt=1, epoch=1))
    progress.update(event("island_joined", island="us", generation=1, workers=1))
    progress.update(event("outer_step", version=5, fragment=0, committed_sequences=10, total_sequences=40))
    progress.update(event("run_started", run="r", attempt=2, epoch=2))
    assert progress.islands["us"].state == "ended"
    assert (progress.attempt, progress.share, progress.outer_version) == (2, 0.25, 5)


def test_time_left_counts_this_attempt_only() -> None:
    """Work of an earlier attempt is not speed, start-up is no training time, and waiting counts down."""
    now = [1000.0]
    progress, left = Progress(), TimeLeft(lambda: now[0])

    def take(fact: Event) -> None:
        progress.update(fact)
        left.observe(fact)

    def outer(committed: int, tokens: int) -> Event:
        return event(
            "outer_step", version=1, fragment=0, tokens=tokens, committed_tokens=committed * 10,
            committed_sequences=committed, total_sequences=1000,
        )  # fmt: skip

    take(event("run_started", run="r", attempt=2, epoch=2, continued=True))
    assert left.seconds(progress) is None
    now[0] = 1500.0  # preparing data, starting Ray
    take(event("island_joined", island="us", generation=1, workers=1))
    now[0] = 1510.0
    take(outer(committed=510, tokens=100))  # 500 were there before: 10 sequences in 10 s
    assert left.seconds(progress) == pytest.approx(490.0)
    now[0] = 1520.0
    assert left.seconds(progress) == pytest.approx(480.0)
    take(outer(committed=520, tokens=100))
    assert left.seconds(progress) == pytest.approx(480.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(999), "999 B"), (bytes_text(1234567), "1.2 MB"), (bytes_text(12_345_678), "12 MB"),
        (bytes_text(999_999), "1.0 MB"), (bytes_text(9.97e6), "10 MB"), (bytes_text(3e18), "3000 PB"),
        (count_text(0), "0"), (count_text(21_345), "21.3k"), (count_text(999_950), "1.0M"),
        (duration_text(-1), "0s"), (duration_text(59.4), "59s"), (duration_text(59.6), "1m00s"),
        (duration_text(190), "3m10s"), (duration_text(7500), "2h05m"), (duration_text(270_000), "3d03h"),
        (plural(1, "worker"), "1 worker"), (plural(0, "worker"), "0 workers"),
        (one_line("a\n\x1b[1mb\x1b[0m\tc"), "a b c"), (one_line("abcdef", 5), "ab..."),
    ],
)  # fmt: skip
def test_numbers_read_well(text: str, expected: str) -> None:
    """Units change where they should, and rounding never shows 1000 of a unit."""
    assert text == expected


def test_values_of_events_are_read_without_surprise() -> None:
    """Spelt-out non-finite numbers are numbers; booleans and text are not."""
    assert number("inf") == float("inf")
    assert number("nan") != number("nan")
    assert [number(value) for value in (True, None, "12", [1])] == [None] * 4
    assert (integer("nan", 7), integer(3.9), integer(None)) == (7, 3, 0)
