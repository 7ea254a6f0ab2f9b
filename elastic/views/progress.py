"""Where a run stands, folded from its events: the console and `elastic status` show the same object.

`Progress.update` takes events one by one and keeps only the newest facts, so it stays small however
long a run is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.views.event_log import Event
from elastic.views.format import integer, number


@dataclass
class IslandProgress:
    """The newest facts about one island. Losses are nats per token, `stall_s` seconds of this generation."""

    name: str
    region: str = ""
    state: str = "starting"
    """`starting`, `running`, `lost`, `restarting`, `left` or `ended`."""
    generation: int = 0
    workers: int = 0
    device: str = ""
    version: int | None = None
    step: int = 0
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    tokens_per_s: float = 0.0
    stall_s: float = 0.0
    phase: str = ""
    last_event: str = ""
    last_event_time: float | None = None

    def halt(self, state: str) -> None:
        """The island no longer trains."""
        self.state, self.tokens_per_s, self.workers = state, 0.0, 0


@dataclass
class Validation:
    """The last judgement of the outer parameters on held-out text."""

    version: int
    loss: float | None
    nats_per_byte: float | None
    sequences: int
    final: bool


@dataclass
class Progress:
    """The newest facts about a run; counters are the run's totals over all attempts."""

    run: str = ""
    attempt: int = 0
    epoch: int = 0
    islands: dict[str, IslandProgress] = field(default_factory=dict)
    phase: str = ""
    outer_version: int | None = None
    versions: dict[int, int] = field(default_factory=dict)
    committed_sequences: int = 0
    total_sequences: int = 0
    committed_tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    validation: Validation | None = None
    preparing: tuple[str, float, float | None, str] | None = None
    """Stage, done, total (None: not known) and unit while the corpus is prepared."""
    ended: str | None = None
    """Status of the attempt's `run_ended`, None before it."""

    def update(self, event: Event) -> None:
        """Take the next event."""
        kind = str(event.get("kind"))
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(event)
        name = event.get("island")
        if isinstance(name, str) and (kind in ("island_starting", "island_joined") or name in self.islands):
            island = self.islands[name]
            island.last_event, island.last_event_time = kind, number(event.get("time"))

    # ------------------------------------------------------------------------------ derived

    @property
    def share(self) -> float:
        """Committed share of the budget, 0 to 1."""
        return self.committed_sequences / self.total_sequences if self.total_sequences else 0.0

    @property
    def total_tokens(self) -> float:
        """The budget in tokens, from what a committed sequence held so far."""
        return self.committed_tokens / self.share if self.share else 0.0

    @property
    def running(self) -> list[IslandProgress]:
        """Islands that train now, in the order in which they first came."""
        return [island for island in self.islands.values() if island.state == "running"]

    @property
    def tokens_per_s(self) -> float:
        """Sum over the islands that train now."""
        return sum(island.tokens_per_s for island in self.running)

    # ------------------------------------------------------------------------------- events

    def _on_run_started(self, event: Event) -> None:
        self.run, self.attempt = str(event.get("run", "")), integer(event.get("attempt"))
        self.epoch, self.ended = integer(event.get("epoch")), None
        for island in self.islands.values():  # they ended with the driver that owned them
            island.halt("ended")

    def _on_run_ended(self, event: Event) -> None:
        self.ended, self.preparing = str(event.get("status")), None
        for island in self.running:
            island.halt("ended")

    def _on_data_progress(self, event: Event) -> None:
        done, total = number(event.get("done")), number(event.get("total"))
        self.preparing = (str(event.get("stage")), done or 0.0, total, str(event.get("unit") or ""))

    def _on_data_ready(self, _: Event) -> None:
        self.preparing = None

    def _on_island_starting(self, event: Event) -> None:
        name = str(event["island"])
        island = self.islands.setdefault(name, IslandProgress(name))
        island.region = str(event.get("region") or island.region)
        island.halt("starting")

    def _on_island_joined(self, event: Event) -> None:
        name = str(event["island"])
        island = self.islands.setdefault(name, IslandProgress(name))
        island.state, island.generation = "running", integer(event.get("generation"))
        island.workers, island.device = integer(event.get("workers")), str(event.get("device") or "")
        island.version = newest(event.get("version"))
        island.step = integer(event.get("resumed_step"))
        island.stall_s, island.tokens_per_s = 0.0, 0.0

    def _known(self, event: Event) -> IslandProgress | None:
        """The island of an event; None if the event is of an older generation than the one that runs."""
        island = self.islands.get(str(event.get("island")))
        if island is None or integer(event.get("generation"), island.generation) < island.generation:
            return None
        return island

    def _on_island_progress(self, event: Event) -> None:
        name = str(event["island"])
        if name not in self.islands:  # it joined before the events that are read here
            generation = integer(event.get("generation"))
            self.islands[name] = IslandProgress(name, state="running", generation=generation)
        island = self._known(event)
        if island is None or island.state != "running":
            return
        island.step, island.loss = integer(event.get("step")), number(event.get("loss"))
        island.lr, island.grad_norm = number(event.get("lr")), number(event.get("grad_norm"))
        island.tokens = integer(event.get("tokens"))
        island.tokens_per_s = number(event.get("tokens_per_s")) or 0.0
        island.stall_s = number(event.get("stall_s")) or 0.0
        island.phase = str(event.get("phase") or "")

    def _on_adopted(self, event: Event) -> None:
        island = self._known(event)
        if island is not None:
            island.version = newest(event.get("version"))

    def _on_island_lost(self, event: Event) -> None:
        if (island := self._known(event)) is not None:
            island.halt("lost")

    def _on_island_left(self, event: Event) -> None:
        if (island := self._known(event)) is not None:
            island.halt("left")

    def _on_island_restarting(self, event: Event) -> None:
        if (island := self._known(event)) is not None:
            island.halt("restarting")

    def _on_outer_step(self, event: Event) -> None:
        version = newest(event.get("version"))
        if version is not None:
            self.outer_version = version
            self.versions[integer(event.get("fragment"))] = version
        self.phase = str(event.get("phase") or self.phase)
        for name in ("committed_sequences", "total_sequences", "committed_tokens", "bytes_up", "bytes_down"):
            setattr(self, name, integer(event.get(name), getattr(self, name)))

    def _on_phase_changed(self, event: Event) -> None:
        self.phase = str(event.get("phase"))

    def _on_validated(self, event: Event) -> None:
        self.validation = validation_of(event)


def newest(version: object) -> int | None:
    """The highest of a version, a list of versions (one a fragment), or None."""
    if isinstance(version, (list, tuple)):
        return max((integer(entry) for entry in version), default=None)
    return None if number(version) is None else integer(version)


def validation_of(fields: Mapping[str, object]) -> Validation:
    """A `validated` event, or the same fields of a state record."""
    return Validation(
        version=newest(fields.get("version")) or 0,
        loss=number(fields.get("loss")),
        nats_per_byte=number(fields.get("nats_per_byte")),
        sequences=integer(fields.get("sequences")),
        final=bool(fields.get("final")),
    )


class TimeLeft:
    """Seconds left, from the tokens that this attempt committed since its first island trained.

    `clock` is this process's own monotonic clock. Work of earlier attempts does not count as speed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._tokens_before: int | None = None
        self._last_commit = 0.0

    def observe(self, event: Event) -> None:
        """Take the next event of this attempt."""
        if event.get("kind") == "run_started":
            self._since, self._tokens_before = None, None
        elif event.get("kind") == "island_joined" and self._since is None:
            self._since = self._clock()
        elif event.get("kind") == "outer_step":
            self._last_commit = self._clock()
            if self._tokens_before is None:
                self._tokens_before = integer(event.get("committed_tokens")) - integer(event.get("tokens"))

    def seconds(self, progress: Progress) -> float | None:
        """Seconds until the budget is committed at this attempt's mean speed, None if not known yet."""
        if self._since is None or self._tokens_before is None:
            return None
        elapsed_s = self._last_commit - self._since
        gained = progress.committed_tokens - self._tokens_before
        if elapsed_s <= 0 or gained <= 0:
            return None
        missing = progress.total_tokens - progress.committed_tokens
        return max(0.0, missing * elapsed_s / gained - (self._clock() - self._last_commit))


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest; NaN if one of them is NaN."""
    bad = [value for value in values if value != value]
    return (bad[0], bad[0]) if bad else (min(values), max(values))
