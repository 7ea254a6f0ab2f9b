"""What the synchronizer knows, under one lock: who takes part, what is open, what was published.

The board joins the pure decisions of `elastic.policy` with the tensors that wait for them. It takes
no decision of its own and does no arithmetic; `elastic.runtime.synchronizer` moves its pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.base.config import Job
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Basis, Beat, Hello, Packet, Part, Phase
from elastic.policy.evaluation import EvaluationQueue
from elastic.policy.ledger import Ledger
from elastic.policy.membership import Membership
from elastic.policy.plan import warmup_sequences
from elastic.policy.rounds import Contribution, Rounds

EVENTS_KEPT = 10_000
PACKETS_KEPT = 2


@dataclass(frozen=True)
class RunSetup:
    """What the synchronizer needs to know of a run, fixed for an epoch."""

    job: Job
    run: str
    epoch: int
    islands: tuple[str, ...]
    total_sequences: int
    block_sequences: int
    validation_sequences: int
    tokens_per_byte: float
    """Of the held-out text: turns nats per token into nats per byte."""
    vocab_size: int
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price of one worker hour, by island."""


@dataclass
class Stretch:
    """Synchronous steps since the last anchor: merged in memory, not yet durable."""

    steps: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    island_steps: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, RangeSet] = field(default_factory=dict)

    def add(self, header: Contribution, loss_sum: float) -> None:
        """One island's gradient was merged."""
        name = header.island
        self.tokens[name] = self.tokens.get(name, 0) + header.tokens
        self.losses[name] = self.losses.get(name, 0.0) + loss_sum
        self.island_steps[name] = self.island_steps.get(name, 0) + header.steps
        self.ranges[name] = self.ranges.get(name, RangeSet()) | header.ranges


@dataclass
class Anchor:
    """The end of a stretch: digests of all, tensors of one."""

    expected: list[str]
    digests: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    rows: dict[str, dict[int, Part]] = field(default_factory=dict)

    def take(self, part: Part) -> None:
        """Note the digest of a rank, and its tensors if it sent them."""
        member = part.member
        self.digests.setdefault(member.island, {})[member.rank] = part.partial_digest
        self.sizes[member.island] = member.world_size
        if part.rows is not None:
            self.rows.setdefault(member.island, {})[member.rank] = part

    def forget(self, island: str) -> None:
        """The island is lost, or has begun anew."""
        for held in (self.digests, self.sizes, self.rows):
            held.pop(island, None)

    def donor(self, live: Iterable[str]) -> str | None:
        """The island whose tensors become the version: the first by name that still lives."""
        waiting = sorted(set(self.expected) & set(live))
        return waiting[0] if waiting else None

    def is_complete(self, live: Iterable[str]) -> bool:
        """All live islands have sent digests, and the donor its tensors."""
        donor = self.donor(live)
        if donor is None or len(self.rows.get(donor, {})) < self.sizes.get(donor, 1):
            return False
        names = set(self.expected) & set(live)
        return all(len(self.digests.get(name, {})) == self.sizes.get(name, -1) for name in names)


class Board:
    """The state of the outer loop between two looks of the synchronizer."""

    def __init__(
        self, setup: RunSetup, version: int, phase: Phase, committed: RangeSet, generations: Mapping[str, int]
    ) -> None:
        job = setup.job
        self.setup = setup
        self.membership = Membership(job.outer.island_timeout_s, generations)
        self.ledger = Ledger(setup.total_sequences, setup.block_sequences, 1, committed)
        self.rounds = Rounds(1, job.outer.weights, [version])
        self.gradients = Rounds(1, "tokens", [0], kind="gradient")
        self.phase: Phase = phase
        self.warmup_sequences = warmup_sequences(job, setup.total_sequences, len(setup.islands))
        """Positions that the synchronous phase trains on."""
        self.merged_version: dict[str, int] = {}
        """Newest version that holds a contribution of an island, in this epoch."""
        self.stretch = Stretch()
        self.anchor: Anchor | None = None
        self.anchor_step = 0
        """Synchronous steps merged when the last anchor became durable."""
        self.durable = committed
        """Positions committed by durable records; the ledger may be ahead by the open stretch."""
        self.parts: dict[str, dict[int, Part]] = {}
        self.packets: dict[str, deque[Packet]] = {
            "version": deque(maxlen=PACKETS_KEPT),
            "gradient": deque(maxlen=PACKETS_KEPT),
        }
        self.beats: dict[str, Beat] = {}
        self.workers: dict[str, int] = {}
        self.joined: set[str] = set()
        self.basis = self._basis_now()
        """Of the newest version: the same for all who hold it, whenever they came to it."""
        self.claims: dict[str, bool] = {}
        """Whether an island that has just joined goes on from the progress of its own checkpoint."""
        self.waiting: set[str] = set()
        """Joined islands that are not admitted yet."""
        self.stopped: set[str] = set()
        """Islands that saved themselves because the run stops; an open round does not close without them."""
        self.begun = False
        self.stopping = ""
        self.evaluation: EvaluationQueue | None = None
        self.finished = False
        self.failure = ""
        self.storage_failed = False
        self.events: deque[tuple[int, dict[str, Any]]] = deque(maxlen=EVENTS_KEPT)

    @property
    def version(self) -> int:
        """Newest durable version."""
        return self.rounds.versions[0]

    @property
    def gradient_step(self) -> int:
        """Synchronous steps merged so far in this epoch."""
        return self.gradients.versions[0]

    @property
    def stretch_open(self) -> bool:
        """Whether synchronous steps are merged that no anchor has made durable yet."""
        return self.gradient_step > self.anchor_step

    @property
    def quorum(self) -> list[str]:
        """Islands without which a round does not close: the live ones.

        While the run stops also those that have saved themselves: what they hold is part of the
        round, and continues with it.
        """
        return sorted({*self.membership.live, *self.stopped})

    def claim(self, hello: Hello, generation: int) -> None:
        """Lease again what the checkpoint of an island that joins has in hand, as far as that is free.

        The trained part counts only at the version it was trained from, and all of it or nothing. The
        rest stays the island's even if the version has moved on, so that a run that was stopped and
        continued deals its data as if nothing had happened.
        """
        name, ledger = hello.island, self.ledger
        current = self.phase == "outer" and hello.base_version == self.version
        claimed = current and ledger.claim(name, generation, hello.held)
        ledger.claim(name, generation, hello.rest & ledger.free)
        self.claims[name] = claimed and bool(ledger.held(name, generation))

    def phase_for(self, committed: int) -> Phase:
        """The phase that follows when this many positions are committed; a whole synchronous run has one."""
        whole = self.warmup_sequences == self.setup.total_sequences
        return "synchronous" if whole or committed < self.warmup_sequences else "outer"

    def refresh_basis(self) -> None:
        """Fix the basis: at a new version, or while nobody works with the last one."""
        self.basis = self._basis_now()

    def _basis_now(self) -> Basis:
        job = self.setup.job
        members, generations = self.membership.members, self.membership.generations
        busy = [
            name
            for name in members
            if self.ledger.held(name, generations[name]) or self.ledger.has_for(name, members)
        ]
        islands = len(busy) or len(self.setup.islands)
        seq_len = job.data.seq_len
        return Basis(
            committed_tokens=self.ledger.committed_count * seq_len,
            tokens_per_step=islands * job.inner.batch_sequences * seq_len,
            total_tokens=self.setup.total_sequences * seq_len,
        )

    def let_in(self, island: str) -> None:
        """A waiting island takes part from here on."""
        self.membership.wake(island, self.membership.generations[island])
        self.waiting.discard(island)

    def forget(self, island: str) -> RangeSet:
        """An incarnation is over: its parts are void and its leases go back; returns the latter."""
        for dropped in (*self.rounds.withdraw(island), *self.gradients.withdraw(island)):
            self.parts.pop(dropped, None)
        if self.anchor is not None:
            self.anchor.forget(island)
        if self.evaluation is not None:
            self.evaluation.release(island)
        self.waiting.discard(island)
        keep = self.rounds.pending_ranges(island) | self.gradients.pending_ranges(island)
        return self.ledger.release(island, keep=keep)

    def roll_back(self) -> int:
        """Nobody is left in a stretch: back to the last anchor; returns the steps that are redone."""
        lost, before = self.gradient_step - self.anchor_step, self.ledger
        self.ledger = Ledger(self.setup.total_sequences, self.setup.block_sequences, 1, self.durable)
        self.ledger.replayed_sequences = before.replayed_sequences
        for (island, generation), ranges in before.leased.items():  # of those that wait to be let in
            self.ledger.claim(island, generation, ranges)
        # Numbers of gradients go on: whoever holds one of the steps that are redone never mixes them up.
        self.gradients = Rounds(1, "tokens", [self.gradient_step], kind="gradient")
        self.anchor_step = self.gradient_step
        self.stretch, self.anchor = Stretch(), None
        self.packets["gradient"].clear()
        self.parts.clear()
        return lost
