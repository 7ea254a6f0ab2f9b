"""What the synchronizer knows, under one lock: who takes part, what is open, what was published.

The board joins the pure decisions of `elastic.policy` with the tensors that wait for them. It takes
no decision of its own and does no arithmetic; `elastic.runtime.synchronizer` moves its pieces.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.base.config import Job
from elastic.base.known import known
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Basis, Beat, Hello, Packet, Part, Phase
from elastic.policy.evaluation import EvaluationQueue
from elastic.policy.guard import Guard
from elastic.policy.ledger import Ledger
from elastic.policy.membership import Membership
from elastic.policy.plan import warmup_sequences
from elastic.policy.rounds import Contribution, Rounds, Rules

EVENTS_KEPT = 10_000
PACKETS_KEPT = 4


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
        self,
        setup: RunSetup,
        versions: Sequence[int],
        phase: Phase,
        committed: RangeSet,
        generations: Mapping[str, int],
    ) -> None:
        job = setup.job
        self.setup = setup
        self.membership = Membership(job.outer.island_timeout_s, generations)
        self.fragments = len(versions)
        self.ledger = Ledger(setup.total_sequences, setup.block_sequences, self.fragments, committed)
        self.rounds = Rounds(self.fragments, rules_of(job), versions)
        self.gradients = Rounds(1, versions=[0], kind="gradient")
        self.guard = Guard(job.outer.norm_limit)
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
        self.packets: dict[tuple[str, int], deque[Packet]] = defaultdict(lambda: deque(maxlen=PACKETS_KEPT))
        """By kind and fragment, the newest last."""
        self.beats: dict[str, Beat] = {}
        self.workers: dict[str, int] = {}
        self.joined: set[str] = set()
        self.basis = self._basis_now()
        """Of the newest version: the same for all who hold it, whenever they came to it."""
        self.claims: dict[str, tuple[int, ...] | None] = {}
        """Islands that have just joined. Those that go on from the progress of their own checkpoint: which
        fragments took in what was under way; None for the others."""
        self.rebasing: set[str] = set()
        """Islands of which something was refused, until they have started from the current version."""
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
        """The durable version that every fragment has reached."""
        return min(self.rounds.versions)

    @property
    def versions(self) -> tuple[int, ...]:
        """Newest durable version of each fragment."""
        return tuple(self.rounds.versions)

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

    @property
    def sharers(self) -> list[str]:
        """Islands among which the data is dealt: the members that are not quarantined."""
        return [name for name in self.membership.members if not self.guard.is_quarantined(name)]

    @property
    def admissible(self) -> list[str]:
        """Waiting islands that may take part; a quarantined one only to hear that the run is over."""
        return sorted(n for n in self.waiting if self.finished or not self.guard.is_quarantined(n))

    def claim(self, hello: Hello, generation: int, turns: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        """Lease again what the checkpoint of an island that joins has in hand, as far as that is free.

        The trained part counts only at the versions it was trained from, and all of it or nothing; a
        fragment may be one version ahead if `turns`, the contributions in each fragment's newest version,
        hold the one that the checkpoint had under way. The rest stays the island's even if the versions
        have moved on, so that a run that was stopped and continued deals its data as if nothing had
        happened.
        """
        name, ledger = hello.island, self.ledger
        merged = merged_meanwhile(hello, self.versions, turns) if self.phase == "outer" else None
        claimed = False
        if merged is not None:
            pending = [
                ranges - hello.sent[fragment].ranges if fragment in merged else ranges
                for fragment, ranges in enumerate(hello.pending)
            ]
            held = RangeSet(pair for ranges in pending for pair in ranges)
            claimed = ledger.claim(name, generation, held, pending)
        ledger.claim(name, generation, hello.rest & ledger.free)
        in_hand = bool(ledger.held(name, generation) or hello.sent)
        self.claims[name] = merged if claimed and in_hand else None

    def phase_for(self, committed: int) -> Phase:
        """The phase that follows when this many positions are committed; a whole synchronous run has one."""
        whole = self.warmup_sequences == self.setup.total_sequences
        return "synchronous" if whole or committed < self.warmup_sequences else "outer"

    def refresh_basis(self) -> None:
        """Fix the basis: at a new version, or while nobody works with the last one."""
        self.basis = self._basis_now()

    def _basis_now(self) -> Basis:
        job = self.setup.job
        members, generations = self.sharers, self.membership.generations
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
        total, block = self.setup.total_sequences, self.setup.block_sequences
        self.ledger = Ledger(total, block, self.fragments, self.durable)
        self.ledger.replayed_sequences = before.replayed_sequences
        for (island, generation), ranges in before.leased.items():  # of those that wait to be let in
            self.ledger.claim(island, generation, ranges)
        # Numbers of gradients go on: whoever holds one of the steps that are redone never mixes them up.
        self.gradients = Rounds(1, versions=[self.gradient_step], kind="gradient")
        self.anchor_step = self.gradient_step
        self.stretch, self.anchor = Stretch(), None
        self.packets["gradient", 0].clear()
        self.parts.clear()
        return lost


def rules_of(job: Job) -> Rules:
    """The rules of the outer rounds, from a resolved job."""
    outer = job.outer
    return Rules(
        weights=outer.weights,
        quorum=outer.quorum if isinstance(outer.quorum, int) else None,
        grace_s=known(outer.grace_s),
        staleness_discount=outer.staleness_discount,
        max_staleness=known(outer.max_staleness),
        partial=outer.partial,
    )


def merged_meanwhile(
    hello: Hello, versions: Sequence[int], turns: Sequence[Mapping[str, tuple[int, int]]]
) -> tuple[int, ...] | None:
    """Fragments that took in what the island's checkpoint had under way; None if it is of other versions."""
    if len(hello.bases) != len(versions):
        return None
    merged = []
    for fragment, (base, version) in enumerate(zip(hello.bases, versions, strict=True)):
        if base == version:
            continue
        sent = hello.sent.get(fragment)
        if sent is None or base + 1 != version:
            return None
        if turns[fragment].get(hello.island) != (sent.generation, sent.seq):
            return None
        merged.append(fragment)
    return tuple(merged)
