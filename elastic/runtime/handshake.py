"""What an island must show before it may take part, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.base.errors import ConfigError
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Entry, Hello, Member, Part
from elastic.exchange.wire import pack_encoded
from elastic.policy.rounds import Contribution
from elastic.runtime.board import Board
from elastic.runtime.versions import version_differences
from elastic.state.outer_store import OuterStore


def check_hello(hello: Hello, islands: Sequence[str], parameters: str, versions: Mapping[str, str]) -> None:
    """Refuse an island that is not of this run, would train another model, or has other libraries.

    `parameters`: the run's fingerprint; `versions`: the run's libraries. Raises ConfigError with a table.
    """
    name = hello.island
    if name not in islands:
        raise ConfigError([f"island {name} is not part of this run; its islands: {', '.join(islands)}"])
    differences = version_differences(hello.versions, versions)
    if hello.parameters != parameters:
        differences.append(("parameters", hello.parameters, parameters))
    if differences:
        table = [("", "island", "run"), *differences]
        lines = [f"  {what:<12}{theirs:<20}{ours}" for what, theirs, ours in table]
        fix = "  fix: give its nodes the run's versions (patch levels may differ) and the run's model"
        raise ConfigError([f"island {name} does not fit this run", *lines, fix])


def entry_of(board: Board, store: OuterStore, member: Member, hello: Hello) -> Entry:
    """What an admitted island starts from. The caller holds the lock, and no merge is under way."""
    name = member.island
    synchronous = board.phase == "synchronous"
    merged = board.claims.get(name)
    held = RangeSet(pair for ranges in hello.pending for pair in ranges)
    leased = board.ledger.held(name, member.generation)
    return Entry(
        versions=board.versions,
        phase=board.phase,
        digest=store.digest,
        tensors=pack_encoded(store.published, "fp32"),
        basis=board.basis,
        claimed=merged is not None,
        last_fragment=store.last_fragment,
        merged=merged or (),
        leased=leased if merged is None else leased - held,
        gradient_step=board.gradient_step,
        moments=pack_encoded(store.moments, "fp32") if synchronous and store.moments else None,
        adam_steps=store.adam_steps,
    )


def header_of(part: Part) -> Contribution:
    """What the rules of a round need to know of a part."""
    return Contribution(
        island=part.member.island,
        generation=part.member.generation,
        fragment=part.fragment,
        seq=part.seq,
        base_version=part.base_version,
        from_step=part.from_step,
        to_step=part.to_step,
        tokens=part.tokens,
        steps=part.steps,
        ranges=part.ranges,
        parts=part.member.world_size,
        kind="gradient" if part.kind == "gradient" else "delta",
    )
