"""Where an island stands towards the others in the outer phase: what its checkpoint must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic.base.ranges import RangeSet
from elastic.exchange.link import Basis, Sent


@dataclass
class Since:
    """Inner steps since a fragment's last snapshot."""

    steps: int = 0
    tokens: int = 0
    """Of the whole island."""
    loss_sum: float = 0.0
    """Training loss summed over this rank's share of these tokens."""


@dataclass(frozen=True)
class UnderWay:
    """A contribution between its snapshot and the adoption of the version that it leads to."""

    fragment: int
    generation: int
    """In which it was sent first."""
    seq: int
    base_version: int
    from_step: int
    to_step: int
    tokens: int
    steps: int
    ranges: RangeSet
    loss_sum: float

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "ranges": self.ranges.to_json()}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> UnderWay:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = {**fields, "ranges": RangeSet.from_json(fields["ranges"])}
        return UnderWay(**values)


@dataclass
class Progress:
    """An island between two versions; lists are by fragment."""

    versions: list[int]
    """Adopted."""
    position: int = 0
    """Step of the schedule that was taken last."""
    start: int = 0
    """Step of the schedule at which the island began."""
    since: list[Since] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    """Own inner steps that the adopted version has not taken in."""
    uncounted: int = 0
    """Own inner steps that the committed tokens of `basis` do not count."""
    held: list[RangeSet] = field(default_factory=list)
    """Positions trained since the last snapshot."""
    under_way: list[UnderWay] = field(default_factory=list)
    sent_now: list[int] = field(default_factory=list)
    """Fragments whose snapshot at `position` has been taken."""
    adopted_now: list[int] = field(default_factory=list)
    """Fragments whose version due at `position` has been adopted."""
    missed: RangeSet = RangeSet()
    """Positions in contributions that came too late for their version and wait for another one."""
    basis: Basis | None = None

    def __post_init__(self) -> None:
        """A fresh one has nothing in hand."""
        count = len(self.versions)
        self.since = self.since or [Since() for _ in range(count)]
        self.ahead = self.ahead or [0] * count
        self.held = self.held or [RangeSet()] * count

    @property
    def pending(self) -> tuple[RangeSet, ...]:
        """By fragment what is trained and not merged as far as the island knows, without the missed."""
        pending = list(self.held)
        for sent in self.under_way:
            pending[sent.fragment] = pending[sent.fragment] | sent.ranges
        return tuple(ranges - self.missed for ranges in pending)

    @property
    def sent(self) -> dict[int, Sent]:
        """What is under way, as a synchronizer knows it."""
        return {
            each.fragment: Sent(each.generation, each.seq, each.ranges - self.missed)
            for each in self.under_way
        }

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        plain = asdict(self)
        return {
            **plain,
            "held": [ranges.to_json() for ranges in self.held],
            "under_way": [each.to_json() for each in self.under_way],
            "missed": self.missed.to_json(),
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Progress:
        """Read what `to_json` wrote."""
        basis = fields["basis"]
        changed: dict[str, Any] = {
            "since": [Since(**each) for each in fields["since"]],
            "held": [RangeSet.from_json(ranges) for ranges in fields["held"]],
            "under_way": [UnderWay.from_json(each) for each in fields["under_way"]],
            "missed": RangeSet.from_json(fields["missed"]),
            "basis": Basis(**basis) if basis else None,
        }
        return Progress(**{**fields, **changed})
