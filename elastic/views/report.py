"""`report/report.md` of a run: loss curves, goodput and traffic, from its events alone.

Goodput is stated in two parts: the share of trained tokens that was committed (the rest was lost in
crashes, refused, or is still in flight) and the tokens committed per second of the attempts' time.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.base.errors import ConfigError
from elastic.views.event_log import Event, read_events
from elastic.views.format import bytes_text, count_text, duration_text, integer, number, one_line
from elastic.views.status import RunStatus, StatusReader

if TYPE_CHECKING:
    from elastic.state.storage import Storage

MAX_POINTS = 2000
UNFINISHED = "killed or running"


@dataclass
class Curve:
    """A curve with at most twice `MAX_POINTS` points: when it is full, every second one goes."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def add(self, x: float, y: float | None) -> None:
        """Take a point; a missing number is left out."""
        self._seen += 1
        if y is None or self._seen % self._every:
            return
        self.x.append(x)
        self.y.append(y)
        if len(self.x) >= 2 * MAX_POINTS:
            self.x, self.y, self._every = self.x[::2], self.y[::2], self._every * 2


@dataclass
class Attempt:
    """One life of the driver, by its own clock."""

    number: int
    started: float
    ended: float
    tokens_before: int
    tokens_after: int = 0
    status: str = UNFINISHED

    @property
    def lasted_s(self) -> float:
        """From its first to its last event."""
        return self.ended - self.started


@dataclass
class Facts:
    """What the report shows, gathered in one pass over the events."""

    attempts: list[Attempt] = field(default_factory=list)
    validation: Curve = field(default_factory=Curve)
    losses: dict[str, Curve] = field(default_factory=dict)
    trained_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    """By island and generation: tokens trained, committed or not."""
    stall_s: dict[tuple[str, int], float] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    committed_tokens: int = 0

    def update(self, event: Event) -> None:
        """Take the next event."""
        kind, when = event["kind"], number(event["time"]) or 0.0
        if kind == "run_started":
            self.attempts.append(Attempt(integer(event["attempt"]), when, when, self.committed_tokens))
        elif kind == "outer_step":
            self.committed_tokens = max(self.committed_tokens, integer(event["committed_tokens"]))
        elif kind == "validated":
            self.validation.add(self.committed_tokens, number(event["loss"]))
        elif kind == "island_progress":
            key = (str(event["island"]), integer(event["generation"]))
            self.trained_tokens[key] = integer(event["tokens"])
            self.stall_s[key] = number(event["stall_s"]) or 0.0
            self.losses.setdefault(key[0], Curve()).add(self.committed_tokens, number(event["loss"]))
        elif kind == "island_lost":
            name = str(event["island"])
            self.lost[name] = self.lost.get(name, 0) + 1
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is not None and attempt.status == UNFINISHED:  # later events are of one that never began
            attempt.ended, attempt.tokens_after = max(attempt.ended, when), self.committed_tokens
            if kind == "run_ended":
                attempt.status = str(event["status"])


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        problem = f"elastic report draws with matplotlib, which cannot be imported ({error})"
        raise ConfigError([f"{problem}\n  fix: pip install 'elastic-islands[report]'"]) from error
    return pyplot


def write_report(storage: Storage) -> list[str]:
    """Write `report/report.md` and `report/loss.png`; returns their names.

    Raises RunFolderError without a run, ConfigError (exit 2) without the extra `report`.
    """
    pyplot = _pyplot()
    status = StatusReader(storage).read()
    facts = Facts()
    for event in read_events(storage):
        facts.update(event)
    with tempfile.TemporaryDirectory(prefix="elastic-report-") as folder:
        picture = Path(folder) / "loss.png"
        _draw(pyplot, facts, picture)
        storage.write("report/loss.png", picture.read_bytes())
    storage.write("report/report.md", report_text(status, facts).encode())
    return ["report/report.md", "report/loss.png"]


def _draw(pyplot: Any, facts: Facts, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, curve in facts.losses.items():
        axes.plot(curve.x, curve.y, linewidth=0.8, alpha=0.7, label=f"{name}, training")
    validation = facts.validation
    axes.plot(validation.x, validation.y, "ko-", markersize=3, label="outer parameters, validation")
    axes.set_xlabel("committed tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report_text(status: RunStatus, facts: Facts) -> str:
    """The page as Markdown."""
    trained = sum(facts.trained_tokens.values())
    seconds = sum(attempt.lasted_s for attempt in facts.attempts)
    goodput = [
        ["tokens committed", f"{facts.committed_tokens:,}"],
        ["tokens trained", f"{trained:,}"],
        ["committed of trained", f"{min(1.0, facts.committed_tokens / trained):.1%}" if trained else "-"],
        ["committed per second", count_text(facts.committed_tokens / seconds) if seconds else "-"],
        ["sequences trained again", f"{status.replayed_sequences:,}"],
    ]
    up, down = status.bytes_up - status.bytes_up_warmup, status.bytes_down - status.bytes_down_warmup
    rows = [("warm-up", status.bytes_up_warmup, status.bytes_down_warmup), ("after it", up, down)]
    rows.append(("whole run", status.bytes_up, status.bytes_down))
    lines = [
        f"# Run {status.run}",
        "",
        f"{status.state}, {status.progress:.0%} of {status.total_sequences:,} sequences,"
        f" {status.outer_steps} outer steps.",
        "",
        "![loss](loss.png)",
        "",
        "## Goodput",
        "",
        *_table(["what", "value"], goodput),
        "",
        "Tokens trained are counted from progress events and may lack the last seconds of a killed island.",
        "",
        "## Attempts",
        "",
        *_table(
            ["attempt", "lasted", "ended", "tokens committed"],
            [
                [str(a.number), duration_text(a.lasted_s), a.status, f"{a.tokens_after - a.tokens_before:,}"]
                for a in facts.attempts
            ],
        ),
        "",
        "## Islands",
        "",
        *_table(["island", "generations", "tokens trained", "waited", "lost"], _island_rows(facts)),
        "",
        "## Traffic",
        "",
        *_table(["phase", "up", "down"], [[name, bytes_text(u), bytes_text(d)] for name, u, d in rows]),
    ]
    if status.warnings:
        lines += ["", "## Newest warnings", "", *(f"- {one_line(warning)}" for warning in status.warnings)]
    return "\n".join(lines) + "\n"


def _island_rows(facts: Facts) -> list[list[str]]:
    rows = []
    for name in facts.losses:
        mine = [key for key in facts.trained_tokens if key[0] == name]
        tokens, waited_s = (sum(of[key] for key in mine) for of in (facts.trained_tokens, facts.stall_s))
        lost = str(facts.lost.get(name, 0))
        rows.append([name, str(len(mine)), f"{tokens:,}", duration_text(waited_s), lost])
    return rows


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
