"""What people see: golden lines, a bounded rate, and a table that stays one table."""

from __future__ import annotations

import io
import re
import threading
from datetime import timezone

import pytest
from rich.console import Console

from elastic.base.events import KINDS, make_event
from elastic.views.console import Lines, LiveTable, open_console
from elastic.views.describe import describe
from elastic.views.event_log import Event
from elastic.views.summary import summary

pytestmark = pytest.mark.unit

NOON = 1_700_049_600.0  # 12:00:00 UTC


class Clock:
    """A monotonic clock that is moved by hand; events are stamped with it, too."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def event(self, kind: str, **fields: object) -> Event:
        """An event of this moment; fields that are not given are None."""
        return make_event(kind, "w", 0, NOON + self.now, {**dict.fromkeys(KINDS[kind].fields), **fields})

    def joined(self, island: str, generation: int = 1, **fields: object) -> Event:
        """An island has one CPU worker."""
        base = {"workers": 1, "device": "cpu", "version": 0, "digest": "1a2b3c4d5e6f7a8b", "resumed_step": 0}
        return self.event("island_joined", island=island, generation=generation, **{**base, **fields})

    def step(self, island: str, step: int, loss: float = 1.93, generation: int = 1) -> Event:
        """An island says where it is."""
        fields = {"generation": generation, "lr": 1e-3, "grad_norm": 1.0, "tokens": step * 8192}
        fields |= {"tokens_per_s": 10_650.0, "stall_s": 2.0, "phase": "outer"}
        return self.event("island_progress", island=island, step=step, loss=loss, **fields)

    def outer(self, version: int, committed: int, total: int = 39_000) -> Event:
        """A new version after `committed` sequences of 256 tokens, 40 steps since the last one."""
        return self.event(
            "outer_step", version=version, fragment=0, phase="outer", islands=["us", "eu"], tokens=40 * 8192,
            committed_sequences=committed, total_sequences=total, committed_tokens=committed * 256,
            bytes_up=version * 1_000_000, bytes_down=version * 1_000_000,
        )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    """A clock at zero."""
    return Clock()


def lines_of(stream: io.StringIO) -> list[str]:
    """What was written, line by line."""
    return stream.getvalue().splitlines()


def test_the_lines_of_a_run_are_these(clock: Clock) -> None:
    """Golden text of a small run: start, data, islands, progress, trouble, end."""
    stream = io.StringIO()
    lines = Lines(stream, every_s=10.0, clock=clock, zone=timezone.utc)
    show = lines.show
    show(clock.event("run_started", run="quick", attempt=2, epoch=2, continued=True, versions=[7]))
    show(clock.event("derived", key="outer.lr", value=0.7, why="preset diloco"))
    show(clock.event("data_progress", stage="tokenising", done=10, total=40, unit="files"))
    show(
        clock.event(
            "data_ready",
            train_sequences=39_000,
            validation_sequences=4300,
            train_bytes=10_000_000,
            validation_bytes=1_100_000,
            skipped=["a.md"],
        )
    )
    show(clock.event("island_starting", island="us", region="us-east", workers=[1, 2]))
    show(clock.event("island_starting", island="eu", region="eu", workers=1))
    show(clock.joined("us"))
    show(clock.joined("eu", generation=3, version=7, resumed_step=140))
    show(
        clock.event("phase_changed", phase="outer", version=7, digest="ffeeddccbbaa99", islands=["us", "eu"])
    )
    clock.now = 100.0
    show(clock.outer(12, 13_260))
    show(clock.event("validated", version=12, loss=1.9812, nats_per_byte=1.9812, sequences=64, final=False))
    show(clock.step("us", 240, 1.93))
    show(clock.step("eu", 240, 1.95, generation=3))
    clock.now = 191.0
    show(clock.step("us", 240, 1.93))
    show(clock.event("refused", island="eu", generation=3, id="eu/3/0/9", reason="not finite: blocks.0.w"))
    show(clock.event("island_lost", island="eu", generation=3, reason="worker died", returned_sequences=1))
    show(clock.event("island_restarting", island="eu", reason="worker died", delay_s=2.0))
    show(clock.event("fell_back", name="outer/x", reason="hash differs", instead="outer/y"))
    show(clock.event("data_changed", files=["a", "b"]))
    show(clock.event("warning", what="3 retries of storage"))
    show(clock.event("island_left", island="us", generation=1, reason="done"))
    show(clock.event("run_stopping", reason="Ctrl-C", signal="SIGINT"))
    show(clock.event("validated", version=13, loss=1.5, nats_per_byte=None, sequences=4300, final=True))
    show(clock.event("run_ended", status="stopped", exit_code=130, reason="SIGINT"))
    lines.close()
    assert lines_of(stream) == [
        "12:00:00 run quick: attempt 2 continues from version 7",
        "12:00:00 outer.lr = 0.7 (preset diloco)",
        "12:00:00 data: tokenising 10 of 40 files (25%)",
        "12:00:00 data ready: 39,000 training sequences (10 MB), 4,300 for validation (1.1 MB); skipped a.md",
        "12:00:00 island us: placing 1 to 2 workers in region us-east",
        "12:00:00 island eu: placing 1 worker in region eu",
        "12:00:00 island us joined: generation 1, 1 worker on cpu, v0 digest 1a2b3c4d5e6f",
        "12:00:00 island eu joined: generation 3, 1 worker on cpu, v7 digest 1a2b3c4d5e6f,"
        " continues after step 140",
        "12:00:00 phase outer from v7 digest ffeeddccbbaa on us, eu",
        "12:01:40 step 0-140 | 34% | loss - | outer v12 | 0 tok/s"
        " | up 12 MB down 12 MB | 2 islands, 2 workers | 33m31s left",
        "12:01:40 validation of v12: loss 1.9812, 1.9812 nats per byte, 64 sequences",
        "12:03:11 step 240 | 34% | loss us 1.93 eu 1.95 | outer v12 val 1.98 | 21.3k tok/s"
        " | up 12 MB down 12 MB | 2 islands, 2 workers | 32m00s left",
        "12:03:11 refused from island eu (generation 3): not finite: blocks.0.w [eu/3/0/9]",
        "12:03:11 island eu lost (generation 3): worker died; 1 sequence back in the queue",
        "12:03:11 island eu starts again in 2s: worker died",
        "12:03:11 warning: outer/x is bad (hash differs); using outer/y",
        "12:03:11 warning: changed since tokenised, the copy is used: a, b",
        "12:03:11 warning: 3 retries of storage",
        "12:03:11 island us left (generation 1): done",
        "12:03:11 stopping: Ctrl-C (SIGINT)",
        "12:03:11 final validation of v13: loss 1.5000, 4,300 sequences",
        "12:03:11 run stopped, exit code 130: SIGINT",
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_event_can_be_shown(clock: Clock, kind: str) -> None:
    """No event of the catalogue breaks a renderer, not even one whose fields are all unknown."""
    stream = io.StringIO()
    lines = Lines(stream, clock=clock, zone=timezone.utc)
    lines.show(clock.event(kind, island="us") if "island" in KINDS[kind].fields else clock.event(kind))
    lines.close()
    assert len(lines_of(stream)) <= 1


def test_the_number_of_lines_is_bounded_for_the_whole_run(clock: Clock) -> None:
    """1000 steps of 4 islands in 500 s give one progress line each 10 s, plain text, and nothing per step."""
    stream = io.StringIO()
    lines = Lines(stream, every_s=10.0, clock=clock)
    islands = ["a", "b", "c", "d"]
    for name in islands:
        lines.show(clock.joined(name))
    for step in range(1, 1001):
        clock.now = step * 0.5
        for name in islands:
            lines.show(clock.step(name, step))
            lines.show(clock.event("adopted", island=name, generation=1, version=step))
        lines.show(clock.outer(step, step * 4))
        judged = {"loss": 2.0, "nats_per_byte": 2.0, "sequences": 64, "final": False}
        lines.show(clock.event("validated", version=step, **judged))
        lines.show(clock.event("refused", island="a", generation=1, id=f"a/1/0/{step}", reason="stale"))
        lines.tick()
    lines.close()
    written = lines_of(stream)
    assert len(written) <= 4 + 3 * 51 + 2
    assert sum(" tok/s | " in line for line in written) <= 51
    assert not re.search(r"[^\x20-\x7e\n]", stream.getvalue())
    assert any("(and 19 alike before it)" in line for line in written)


def test_different_warnings_do_not_hide_each_other(clock: Clock) -> None:
    """The rate bound holds per sentence, numbers aside, and held-back ones are counted at the end."""
    stream = io.StringIO()
    lines = Lines(stream, clock=clock, zone=timezone.utc)
    for number in range(5):
        lines.show(clock.event("warning", what=f"retry {number}"))
        lines.show(clock.event("warning", what=f"disk at {number} %"))
    lines.close()
    assert lines_of(stream) == [
        "12:00:00 warning: retry 0",
        "12:00:00 warning: disk at 0 %",
        "12:00:00 8 facts like earlier ones were not shown; they are events",
    ]


def test_foreign_text_stays_one_clean_line(clock: Clock) -> None:
    """A traceback with colours becomes one line without control characters, of bounded length."""
    stream = io.StringIO()
    lines = Lines(stream, clock=clock)
    reason = "Traceback:\r\n\x1b[31m  boom\x1b[0m\x07\u2028\x9b2J" + "x" * 10_000
    lines.show(clock.event("island_lost", island="us", generation=1, reason=reason, returned_sequences=0))
    (line,) = lines_of(stream)
    assert "Traceback: boom 2Jxxx" in line
    assert len(line) < 500


def test_a_stream_of_another_encoding_does_not_end_the_run(clock: Clock) -> None:
    """Text that the stream cannot say is escaped."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Lines(stream, clock=clock).show(clock.event("warning", what="océan"))
    assert b"warning: oc\\xe9an" in raw.getvalue()


def test_every_line_is_flushed(clock: Clock) -> None:
    """Lines reach a job log when they are written, not when a buffer is full."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw, 2**20), encoding="utf-8")
    Lines(stream, clock=clock).show(clock.event("warning", what="now"))
    assert b"now" in raw.getvalue()


def test_many_islands_share_one_line(clock: Clock) -> None:
    """The progress line does not grow with the fleet, and a bad loss shows in it."""
    stream = io.StringIO()
    lines = Lines(stream, every_s=10.0, clock=clock)
    names = [f"island-{number:03d}" for number in range(200)]
    for name in names:
        lines.show(clock.joined(name))
        lines.show(clock.step(name, 7, 1.5 + int(name[-3:]) / 1000))
    clock.now = 20.0
    lines.show(clock.step(names[0], 7, 1.5))
    assert "loss 1.50 to 1.70 | " in lines_of(stream)[-1]
    assert len(lines_of(stream)[-1]) < 150
    clock.now = 40.0
    lines.show(clock.step(names[5], 7, float("nan")))
    assert "loss nan to nan" in lines_of(stream)[-1]


def test_a_silent_wait_is_said(clock: Clock) -> None:
    """Without events a line says since when and what the last one was, at most every 30 s."""
    stream = io.StringIO()
    lines = Lines(stream, every_s=1.0, clock=clock, zone=timezone.utc)
    lines.show(clock.event("island_starting", island="eu", region="eu", workers=1))
    for second in range(1, 95):
        clock.now = float(second)
        lines.tick()
    placed = "island eu: placing 1 worker in region eu"
    assert lines_of(stream)[1:] == [
        f"12:00:30 no event for 30s, the last was: {placed}",
        f"12:01:00 no event for 1m00s, the last was: {placed}",
        f"12:01:30 no event for 1m30s, the last was: {placed}",
    ]


def test_lines_tick_by_themselves_until_they_are_closed(clock: Clock) -> None:
    """`open_console` off a terminal needs nobody to call `tick`; a closed stream ends the thread quietly."""
    stream = io.StringIO()
    before = threading.active_count()
    console = open_console(stream, 10.0, terminal=False)
    assert threading.active_count() == before + 1
    console.show(clock.event("warning", what="x"))
    console.close()
    assert "warning: x" in stream.getvalue()
    said = threading.Event()
    closed = Lines(Closed(said), clock=clock)
    clock.now = 60.0
    closed.tick_every(0.001)
    assert said.wait(10)


class Closed(io.StringIO):
    """A stream whose reader has gone."""

    def __init__(self, asked: threading.Event) -> None:
        super().__init__()
        self.asked = asked

    def write(self, text: str) -> int:
        """Nobody reads."""
        self.asked.set()
        raise BrokenPipeError


def test_a_terminal_gets_the_table() -> None:
    """`open_console` chooses by what the command line says of the stream."""
    console = open_console(io.StringIO(), 10.0, terminal=True)
    assert isinstance(console, LiveTable)
    console.close()


# ------------------------------------------------------------------------------------------ table


def table_text(table: LiveTable, width: int) -> str:
    """The table as a terminal of this width shows it, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table.render())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_islands_as_rows(clock: Clock) -> None:
    """Golden text of the table, 80 columns wide."""
    table = LiveTable(io.StringIO(), clock=clock, zone=timezone.utc)
    table.show(clock.joined("us"))
    table.show(clock.joined("eu"))
    clock.now = 100.0
    table.show(clock.outer(12, 13_260))
    table.show(clock.event("validated", version=12, loss=1.98, nats_per_byte=1.98, sequences=64, final=False))
    table.show(clock.step("us", 240, 1.93))
    table.show(clock.step("eu", 241, 1.95))
    table.show(clock.event("adopted", island="us", generation=1, version=12))
    table.show(clock.event("island_lost", island="eu", generation=1, reason="x", returned_sequences=0))
    text = table_text(table, 80)
    table.close()
    rows = [line.rstrip() for line in text.splitlines()]
    assert rows == [
        "━━━━━━━━━━━━━╸                            34%  33m31s left",
        "outer v12 val 1.98 | 10.7k tok/s | up 12 MB down 12 MB",
        "island  step  loss       lr  tok/s  workers  state    version  stall",
        "us       240  1.93  1.0e-03  10.7k        1  running      v12     2s",
        "eu       241  1.95  1.0e-03      0        0  lost          v0     2s",
    ]


def test_facts_scroll_above_one_table(clock: Clock) -> None:
    """On a terminal a fact is printed once, and the table is there once at the end."""
    stream = io.StringIO()
    table = LiveTable(stream, clock=clock, zone=timezone.utc)
    table.show(clock.joined("us"))
    table.show(clock.event("warning", what="[red]look[/red] here"))
    table.close()
    assert stream.getvalue().count("warning: [red]look[/red] here") == 1
    assert stream.getvalue().count("island  step") == 1


def test_the_table_shows_how_far_the_data_are(clock: Clock) -> None:
    """While the corpus is prepared there is a bar instead of islands."""
    table = LiveTable(io.StringIO(), clock=clock)
    table.show(clock.event("data_progress", stage="tokenising", done=5e6, total=20e6, unit="bytes"))
    assert "data: tokenising 5.0 MB of 20 MB (25%)" in table_text(table, 80)
    table.show(clock.event("data_progress", stage="listing", done=3, total=None, unit="files"))
    assert "data: listing 3 files" in table_text(table, 80)
    table.close()


def test_the_table_says_that_it_waits(clock: Clock) -> None:
    """A table that does not change says since when."""
    table = LiveTable(io.StringIO(), clock=clock)
    table.show(clock.step("us", 240))
    clock.now = 45.0
    assert "no event for 45s, the last was: island_progress of us" in table_text(table, 100)
    table.close()


# -------------------------------------------------------------------------------------- the end

RESULT = {
    "status": "done", "outer_steps": 24, "islands": 2, "wall_s": 222.3, "reason": "", "exit_code": 0,
    "final_val_loss": 1.97, "final_val_nats_per_byte": 1.97, "validation_bytes": 1_100_000,
    "committed_sequences": 39_000, "total_sequences": 39_000, "committed_tokens": 9_984_000,
    "replayed_sequences": 0, "bytes_up": 82e6, "bytes_down": 82e6, "bytes_up_warmup": 50e6,
    "bytes_down_warmup": 50e6,
}  # fmt: skip


def test_the_last_lines_say_what_to_do_next() -> None:
    """Golden text of the summary of a run that is done."""
    assert summary(RESULT, "runs/quick") == [
        "done: 24 outer steps, 2 islands, 3m42s",
        "  validation loss of the outer parameters 1.9700, 1.9700 nats per byte on 1.1 MB",
        "  committed 39,000 of 39,000 sequences (10.0M tokens), 0 replayed",
        "  traffic up 82 MB, down 82 MB (of it warm-up 50 MB, 50 MB)",
        "next:",
        "  elastic status runs/quick",
        "  elastic audit runs/quick",
        "  elastic export runs/quick DIR",
        "  tensorboard --logdir runs/quick/tensorboard   # pip install tensorboard",
    ]


def test_the_last_lines_of_a_stopped_run_say_how_it_continues() -> None:
    """A run that is not done offers no export, and says that the same command goes on."""
    stopped = {**RESULT, "status": "stopped", "reason": "max_hours", "final_val_loss": None}
    lines = summary(stopped, "'my run'")
    assert lines[:2] == ["stopped: 24 outer steps, 2 islands, 3m42s", "  reason: max_hours"]
    assert "  the same command continues this run" in lines
    assert "  elastic status 'my run'" in lines
    assert not any("export" in line or "validation" in line for line in lines)


def test_kinds_without_a_line_are_those_that_repeat(clock: Clock) -> None:
    """Every other kind of the catalogue has a sentence of its own."""
    silent = {
        kind
        for kind in KINDS
        if describe(clock.event(kind, **({"island": "us"} if "island" in KINDS[kind].fields else {}))) is None
    }
    assert silent == {"island_progress", "outer_step", "adopted", "island_checkpoint", "data_progress"}
