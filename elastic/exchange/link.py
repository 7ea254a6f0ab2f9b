"""What islands and the synchronizer say to each other, and the one Protocol that carries it.

The messages are plain frozen dataclasses of numbers, strings and numpy arrays, so that every
carrier (Ray, and later gRPC and buckets) can write them in a format of its own. Tensors travel as
`elastic.exchange.wire.Wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from elastic.base.ranges import RangeSet
from elastic.exchange.wire import Wire

Phase = Literal["synchronous", "outer"]
Wanted = Literal["version", "whole", "gradient"]


class FencedError(Exception):
    """A message came from an incarnation that is over.

    `superseded` is true when a newer incarnation of the island exists: the sender must end. When it
    is false the island was only taken for lost, and may join again.
    """

    def __init__(self, reason: str, superseded: bool) -> None:
        super().__init__(reason, superseded)
        self.reason, self.superseded = reason, superseded

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Member:
    """Who speaks: one rank of one incarnation of an island."""

    island: str
    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Sent:
    """A contribution under way: its turn, and the data in it."""

    generation: int
    seq: int
    ranges: RangeSet


@dataclass(frozen=True)
class Hello:
    """An island asks to take part."""

    island: str
    workers: int
    device: str
    versions: Mapping[str, str]
    """Versions of the libraries that must agree: elastic, torch."""
    parameters: str
    """Fingerprint of the trainable parameters' names and shapes."""
    step: int = 0
    """Inner steps of its checkpoint, 0 without one."""
    bases: tuple[int, ...] = ()
    """Version of each fragment that its checkpoint holds; empty without a checkpoint."""
    pending: tuple[RangeSet, ...] = ()
    """By fragment: positions its checkpoint has trained on, and of which it has not seen a merge."""
    sent: Mapping[int, Sent] = field(default_factory=dict)
    """By fragment: the contribution that was under way."""
    rest: RangeSet = RangeSet()
    """Positions leased to its checkpoint and not yet trained on."""


@dataclass(frozen=True)
class Basis:
    """From which every island computes the same progress, and so the same learning rate."""

    committed_tokens: int
    tokens_per_step: int
    """Planned tokens of one inner step of all islands that have data left, together."""
    total_tokens: int


@dataclass(frozen=True)
class Entry:
    """The global parameters an island starts from."""

    versions: tuple[int, ...]
    """Of each fragment."""
    phase: Phase
    digest: str
    """Of all fragments together."""
    tensors: Wire
    basis: Basis
    claimed: bool
    """The island's own progress since these versions still counts: it goes on from its checkpoint."""
    last_fragment: int
    """Fragment of the newest outer step, -1 at the start of the schedule: the next one is due next."""
    merged: tuple[int, ...]
    """Of an island that goes on: fragments whose contribution under way was merged meanwhile."""
    leased: RangeSet
    """Positions that its checkpoint had leased, and that it may still train on."""
    gradient_step: int
    """Synchronous steps merged so far."""
    moments: Wire | None = None
    """AdamW's moments (`exp_avg/<name>`, `exp_avg_sq/<name>`) in the synchronous phase."""
    adam_steps: int = 0


@dataclass(frozen=True)
class Work:
    """What an island does next.

    `batches`: train on positions start..stop. `evaluate`: judge held-out sequences start..stop.
    `flush`: no data left, hand in what you have. `enter`: fetch the current version first.
    `wait`: nothing to do now. `done`: the run is complete. `stop`: save yourself and end.
    """

    do: Literal["batches", "evaluate", "flush", "enter", "wait", "done", "stop"]
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Part:
    """The rows of one rank of a contribution.

    `delta`: base - snapshot of one fragment. `gradient`: mean token gradient of one synchronous
    step. `anchor`: parameters and moments after a stretch of synchronous steps, rows only when the
    synchronizer asked for them.
    """

    member: Member
    kind: Literal["delta", "gradient", "anchor"]
    fragment: int
    seq: int
    base_version: int
    from_step: int
    to_step: int
    tokens: int
    steps: int
    ranges: RangeSet
    rows: Wire | None
    partial_digest: tuple[int, ...] = ()
    """Of an anchor: `elastic.training.digest.partial_digest` of its parameters, then of its moments."""
    loss_sum: float = 0.0
    """Summed training loss of these tokens, as rank 0 knows it."""
    finite: bool = True
    square_norm: float = 0.0
    """Of a delta: sum of the squares of this rank's rows."""
    slack_s: float = 0.0
    """Seconds until the island must adopt, as it expects when it sends: how long it can spare to wait."""


@dataclass(frozen=True)
class Receipt:
    """What became of a part."""

    status: Literal["accepted", "duplicate", "waiting-parts", "refused"]
    reason: str = ""


@dataclass(frozen=True)
class Packet:
    """A new version of a fragment, or the merged gradient of a synchronous step."""

    number: int
    """Version, or number of the synchronous step."""
    fragment: int
    base_version: int
    """Version the tensors are a step from; -1: they are whole values."""
    tensors: Wire
    digest: str
    basis: Basis
    grad_norm: float = 0.0
    """Of a gradient: its global norm before clipping."""
    anchor: bool = False
    """Of a gradient: hand in an anchor after this step."""
    phase: Phase = "outer"
    evaluate: str = ""
    """Island that judges this version."""
    merged: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(generation, seq) of the newest contribution of each island in it."""
    moments: Wire | None = None


@dataclass(frozen=True)
class Donate:
    """The synchronizer asks this island for the tensors of its anchor."""


@dataclass(frozen=True)
class Beat:
    """A sign of life, and what the island is doing."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    stall_s: float
    phase: str


@dataclass(frozen=True)
class Command:
    """The answer to a beat."""

    stop: bool = False
    fenced: str = ""


@dataclass(frozen=True)
class Judgement:
    """Result of judging held-out sequences start..stop with one version."""

    version: int
    start: int
    stop: int
    loss_sum: float
    tokens: int
    final: bool


class Link(Protocol):
    """How an island's ranks reach the synchronizer.

    It exists so that the worker's loop is the same under Ray, across clusters and in one process.
    Every call returns or raises within its deadline; `FencedError` means "not you any more".
    """

    def join(self, hello: Hello) -> int:
        """Begin an incarnation; returns its generation. Only rank 0 calls it."""

    def enter(self, member: Member, hello: Hello, timeout_s: float) -> Entry | None:
        """Current global parameters, once the synchronizer admits the island; None: ask again."""

    def lease(self, member: Member, versions: tuple[int, ...]) -> Work:
        """What to do next. Only rank 0 calls it."""

    def offer(self, part: Part) -> Receipt:
        """Hand in one rank's rows."""

    def fetch(
        self,
        member: Member,
        kind: Wanted,
        fragment: int,
        number: int,
        timeout_s: float,
    ) -> Packet | Donate | None:
        """A packet of kind `kind` of this number, or the next later one there is; None: not yet.

        `version`: the step to a fragment's version; `whole`: all values of its newest version, at least
        `number`; `gradient`: the merged gradient of a synchronous step.
        """

    def beat(self, member: Member, beat: Beat) -> Command:
        """Tell that the island lives. Only rank 0 calls it."""

    def judged(self, member: Member, judgement: Judgement) -> None:
        """Hand in a validation result. Only rank 0 calls it."""

    def leave(self, member: Member, reason: str, checkpoint: str = "") -> None:
        """End in order."""


@dataclass(frozen=True)
class Snapshot:
    """What the controller sees of the synchronizer at one moment."""

    phase: Phase
    version: int
    """That every fragment has reached."""
    counters: Mapping[str, float]
    total_sequences: int
    committed_sequences: int
    live: tuple[str, ...]
    joined: tuple[str, ...]
    versions: tuple[int, ...] = (0,)
    """Of each fragment."""
    beats: Mapping[str, Beat] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    merged_version: Mapping[str, int] = field(default_factory=dict)
    """Newest version that holds a contribution of an island, in this attempt."""
    finished: bool = False
    digest: str = ""
    validation: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Why the synchronizer cannot go on; empty while it can."""
    storage_failed: bool = False
