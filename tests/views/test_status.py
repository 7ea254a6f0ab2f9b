"""Status and report of a run, rebuilt from a synthetic run folder alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.base.errors import ConfigError, RunFolderError
from elastic.base.events import KINDS
from elastic.state import layout
from elastic.state.records import RecordLog
from elastic.state.run_file import write_run
from elastic.state.storage import Storage
from elastic.views.event_log import EventLog
from elastic.views.status import NO_HEARTBEAT_S, RunStatus, StatusReader
from elastic.views.status_text import status_line, status_text

pytestmark = pytest.mark.unit

START = 1_700_000_000.0
VALIDATION = {"version": 12, "loss": 1.98, "nats_per_byte": 1.97, "sequences": 64, "final": False}


class Run:
    """A run folder as a driver leaves it, written step by step."""

    def __init__(self, url: str | Path) -> None:
        self.storage = Storage(url)
        self.now = START
        self.attempt = 0
        self.records: RecordLog | None = None
        self.log: EventLog | None = None
        write_run(self.storage, {"run": "quick-1a2b", "job": {"name": "quick"}, "seq_len": 256})

    def emit(self, kind: str, **fields: object) -> None:
        """One event, durable at once; fields that are not given are None."""
        assert self.log is not None
        self.log.emit(kind, {**dict.fromkeys(KINDS[kind].fields), **fields})
        self.log.flush()

    def begin(self) -> None:
        """The next attempt: lock, events, islands, first record."""
        self.attempt += 1
        epoch = self.attempt
        self.storage.create(layout.lock_name(epoch), b"{}")
        self.beat(1)
        self.log = EventLog(self.storage, f"controller-a{epoch}", lambda: self.now, flush_every_s=3600)
        self.emit("run_started", run="quick-1a2b", attempt=epoch, epoch=epoch, continued=epoch > 1)
        for name in ("us", "eu"):
            self.emit("island_starting", island=name, region=name, workers=[1, 1])
            self.emit("island_joined", island=name, generation=epoch, workers=1, device="cpu", version=0)
        self.records = RecordLog(self.storage, epoch, self.records.last if self.records else None)
        self.record("resume" if epoch > 1 else "start", version=0)

    def beat(self, counter: int, released: bool = False) -> None:
        """The driver shows that it lives."""
        data = json.dumps({"counter": counter, "released": released}).encode()
        self.storage.write(layout.beat_name(self.attempt), data)

    def record(self, kind: str, version: int) -> None:
        """One durable record; a version commits 1000 sequences."""
        assert self.records is not None
        counters = {
            "outer_steps": version, "synchronous_steps": 200, "replayed_sequences": 3, "wall_s": 10 * version,
            "bytes_up": version * 10**6, "bytes_down": version * 10**6, "bytes_up_warmup": 10**6,
            "bytes_down_warmup": 10**6, "committed_tokens": version * 1000 * 256,
        }  # fmt: skip
        body = {"run": "quick-1a2b", "versions": [version], "phase": "outer", "counters": counters}
        body |= {"validation": [VALIDATION], "total_sequences": 39_000}
        self.records.append(kind, body)

    def train(self, version: int) -> None:
        """Progress, a record, an outer step."""
        self.now += 10.0
        for name, loss in (("us", 1.93), ("eu", float("nan"))):
            self.emit(
                "island_progress", island=name, generation=self.attempt, step=version * 20, loss=loss,
                tokens=version * 20 * 8192, tokens_per_s=1000.0, stall_s=1.5, phase="outer",
            )  # fmt: skip
        self.record("outer", version)
        self.emit(
            "outer_step", version=version, fragment=0, committed_sequences=version * 1000,
            total_sequences=39_000, committed_tokens=version * 1000 * 256, tokens=256_000,
            bytes_up=version * 10**6, bytes_down=version * 10**6,
        )  # fmt: skip
        self.emit("validated", **{**VALIDATION, "version": version})

    def end(self, status: str, exit_code: int, reason: str = "") -> None:
        """The driver ends in order."""
        self.emit("run_ended", status=status, exit_code=exit_code, reason=reason)
        result = {"status": status, "exit_code": exit_code, "reason": reason, "attempt": self.attempt}
        self.storage.write(layout.RESULT_FILE, json.dumps(result).encode())
        self.beat(99, released=True)
        assert self.log is not None
        self.log.close()

    def status(self) -> RunStatus:
        """What a fresh look says, 3 s after the last event."""
        return StatusReader(self.storage, wall_clock=lambda: self.now + 3.0).read()


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """A run folder on a disk and in a bucket."""
    return Run(tmp_path / "run" if request.param == "local" else f"memory://status/{tmp_path.name}/run")


def test_a_running_run(run: Run) -> None:
    """Golden text and the numbers of a run that trains."""
    run.begin()
    run.train(13)
    run.emit("warning", what="3 retries of storage")
    status = run.status()
    assert status_text(status) == [
        f"run        quick-1a2b in {run.storage.url}",
        "state      running, attempt 1; last event 3s ago by the writer's clock (warning)",
        "progress   33%, 13,000 of 39,000 sequences, 3.3M tokens, 3 replayed, about 4m20s left",
        "outer      v13, 13 outer steps, 200 synchronous steps, phase outer",
        "validation v13 loss 1.9800, 1.9700 nats per byte, 64 sequences",
        "traffic    up 13 MB, down 13 MB (of it warm-up 1.0 MB, 1.0 MB)",
        "island     us: running, generation 1, step 260, loss 1.93, 1.0k tok/s, 1 worker, v0;"
        " last event island_progress",
        "island     eu: running, generation 1, step 260, loss nan, 1.0k tok/s, 1 worker, v0;"
        " last event island_progress",
        "warning    3 retries of storage",
    ]
    assert not status.over


def test_status_as_json_has_every_documented_field(run: Run) -> None:
    """The JSON is strict, and docs/reference/cli-json.md names each of its fields and no others."""
    run.begin()
    run.train(13)
    answer = json.loads(json.dumps(run.status().to_json(), allow_nan=False))
    page = Path(__file__).parents[2].joinpath("docs/reference/cli-json.md").read_text()
    section = page.split("## elastic status")[1].split("\n## ")[0]
    documented = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    fields = set(answer)
    fields |= {f"validation.{key}" for key in answer["validation"]}
    fields |= {f"islands[].{key}" for key in answer["islands"][0]}
    assert documented == fields
    assert answer["islands"][1]["loss"] == "nan"


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        ("done", 0, ""),
        ("stopped", 75, "max_hours"),
        ("failed", 1, "ZeroDivisionError"),
        ("stopped", 143, "SIGTERM"),
    ],
)
def test_the_end_of_a_run(run: Run, status: str, code: int, reason: str) -> None:
    """State, exit code and reason are those of result.json, and the run is over."""
    run.begin()
    run.train(39)
    run.end(status, code, reason)
    seen = run.status()
    assert (seen.state, seen.exit_code, seen.reason, seen.over) == (status, code, reason, True)
    assert seen.left_s is None
    assert {island.state for island in seen.islands} == {"ended"}
    line = f"state      {status}, attempt 1, exit code {code}" + (f": {reason}" if reason else "")
    assert line in status_text(seen)


def test_a_new_attempt_is_not_described_by_the_old_result(run: Run) -> None:
    """From the moment the lock is taken again the run runs, and its counters go on."""
    run.begin()
    run.train(10)
    run.end("stopped", 75, "max_hours")
    run.attempt += 1
    run.storage.create(layout.lock_name(2), b"{}")
    run.beat(1)
    waking = run.status()
    assert (waking.state, waking.exit_code) == ("running", None)
    run.storage.delete(layout.lock_name(2))
    run.attempt -= 1
    run.begin()
    run.train(11)
    seen = run.status()
    assert (seen.state, seen.exit_code, seen.attempt) == ("running", None, 2)
    assert (seen.committed_sequences, seen.versions) == (11_000, [11])
    assert {island.generation for island in seen.islands} == {2}


def test_records_count_even_without_events(run: Run) -> None:
    """What is durable shows although the events of that time never reached storage."""
    run.begin()
    run.record("outer", 20)
    seen = run.status()
    assert (seen.committed_sequences, seen.total_sequences, seen.outer_steps) == (20_000, 39_000, 20)
    assert seen.validation is not None
    assert (seen.versions, seen.validation.loss) == ([20], 1.98)


def test_a_damaged_newest_record_is_a_warning(run: Run) -> None:
    """Status falls back to the record before it, and names the bad one."""
    run.begin()
    run.record("outer", 1)
    run.record("outer", 2)
    name = layout.record_name(1, 2)
    run.storage.write(name, run.storage.read(name).replace(b'"versions":[2]', b'"versions":[3]'))
    seen = run.status()
    assert seen.versions == [1]
    assert any("a state record is bad" in warning and name in warning for warning in seen.warnings)


def test_a_killed_driver_is_noticed_by_watching_only(run: Run) -> None:
    """One look never says that a driver is dead; a counter that stands still while we watch does."""
    run.begin()
    run.train(5)
    run.now += 10_000.0
    assert run.status().state == "running"
    now = [0.0]
    reader = StatusReader(run.storage, wall_clock=lambda: START, clock=lambda: now[0])
    states = []
    for second, counter in ((0, 1), (10, 2), (29, 2), (31, 2), (32, 3)):
        now[0] = float(second)
        run.beat(counter)
        states.append(reader.read().state)
    assert states == ["running"] * 3 + ["no heartbeat", "running"]
    assert NO_HEARTBEAT_S == 20.0


def test_a_driver_that_let_go_without_a_result_has_stopped(run: Run) -> None:
    """A released lock means that nobody trains."""
    run.begin()
    run.beat(2, released=True)
    assert run.status().state == "stopped"


def test_a_run_that_has_only_been_opened(run: Run) -> None:
    """A folder with nothing but run.json can be looked at."""
    seen = run.status()
    assert (seen.state, seen.progress, seen.islands, seen.last_event_age_s) == ("running", 0.0, [], None)
    assert status_text(seen)[2] == "progress   0%, 0 of 0 sequences, 0 tokens, 0 replayed"


def test_a_line_changes_only_when_something_happened(run: Run) -> None:
    """Steps and ages do not change the line; a version, an island or the state does."""
    run.begin()
    run.train(5)
    reader = StatusReader(run.storage, wall_clock=lambda: run.now)
    lines = [status_line(reader.read())]
    run.now += 60
    run.emit("island_progress", island="us", generation=1, step=500, loss=1.0, tokens_per_s=1.0)
    lines.append(status_line(reader.read()))
    run.emit("island_lost", island="eu", generation=1, reason="timeout", returned_sequences=4)
    lines.append(status_line(reader.read()))
    assert lines[0] == lines[1] != lines[2]
    assert (
        lines[0]
        == "quick-1a2b running | attempt 1 | 13% | outer v5 | val 1.98 of v5 | us:running/1 eu:running/1"
    )


def test_a_folder_without_a_run_is_named_with_a_suggestion(tmp_path: Path) -> None:
    """A wrong RUN is exit code 2, and the folder above a run suggests the run."""
    with pytest.raises(RunFolderError, match="no run here") as caught:
        StatusReader(Storage(tmp_path / "nothing")).read()
    assert caught.value.exit_code == 2
    Run(tmp_path / "runs" / "quick")
    with pytest.raises(RunFolderError, match=r"did you mean .*runs/quick\?"):
        StatusReader(Storage(tmp_path / "runs")).read()


def test_status_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    """A look at a run is quick on a machine without accelerators or Ray."""
    Run(tmp_path / "run").begin()
    code = (
        "import sys\nfrom elastic.cli.status import status_command\n"
        f"status_command({str(tmp_path / 'run')!r})\n"
        "assert not {'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------- report


def two_attempts(run: Run) -> None:
    """Crash after version 2, continue to 4."""
    run.begin()
    run.train(1)
    run.train(2)
    run.emit("island_lost", island="eu", generation=1, reason="worker | died", returned_sequences=4)
    run.now += 5.0
    run.begin()
    run.train(3)
    run.train(4)
    run.end("stopped", 75, "max_hours")
    run.now += 1000.0
    with EventLog(run.storage, "controller-a3", lambda: run.now) as log:  # refused before it began
        log.emit("run_ended", {"status": "failed", "exit_code": 2, "reason": "another model"})


def test_the_report_accounts_for_time_and_traffic(run: Run) -> None:
    """Attempts, goodput, islands and traffic are those of the events; the picture is there."""
    pytest.importorskip("matplotlib")
    from elastic.views.report import write_report

    two_attempts(run)
    assert write_report(run.storage) == ["report/report.md", "report/loss.png"]
    assert run.storage.read("report/loss.png").startswith(b"\x89PNG")
    text = run.storage.read("report/report.md").decode()
    for line in (
        "| tokens committed | 1,024,000 |",
        "| tokens trained | 1,966,080 |",
        "| committed of trained | 52.1% |",
        "| 1 | 20s | killed or running | 512,000 |",
        "| 2 | 20s | stopped | 512,000 |",
        "| us | 2 | 983,040 | 3s | 0 |",
        "| eu | 2 | 983,040 | 3s | 1 |",
        "| warm-up | 1.0 MB | 1.0 MB |",
        "| after it | 3.0 MB | 3.0 MB |",
        "- island eu lost (generation 1): worker | died; 4 sequences back in the queue",
    ):
        assert line in text


def test_a_report_stays_small_whatever_the_run() -> None:
    """A curve keeps a bounded number of points, spread over the whole run."""
    from elastic.views.report import MAX_POINTS, Curve

    curve = Curve()
    for step in range(100_000):
        curve.add(step, None if step == 7 else 1.0)
    assert MAX_POINTS / 2 <= len(curve.x) <= 2 * MAX_POINTS
    assert curve.x[0] < 100
    assert curve.x[-1] > 99_000


def test_a_report_without_its_extra_names_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message says what to install."""
    from elastic.views.report import write_report

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"elastic-islands\[report\]"):
        write_report(run.storage)
