"""The synchronizer's answers, call by call: who may speak, who is let in, what it refuses by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from elastic.base.errors import ConfigError, StorageError
from elastic.base.ranges import RangeSet
from elastic.exchange.link import Beat, Entry, FencedError, Member, Packet, Part
from elastic.exchange.wire import Wire, pack
from elastic.runtime.synchronizer import Synchronizer
from elastic.runtime.versions import library_versions, version_differences
from elastic.training.digest import digest

pytestmark = pytest.mark.unit

BEAT = Beat(1, 2.0, 0.1, 1.0, 64, 10.0, 0.0, "outer")


def _member(island: str, generation: int = 1, rank: int = 0, world_size: int = 1) -> Member:
    return Member(island, generation, rank, world_size)


def _enter(synchronizer: Synchronizer, hello: Any, generation: int = 1) -> Entry:
    entry = synchronizer.enter(_member(hello.island, generation), hello, 10.0)
    assert entry is not None
    return entry


def _part(
    member: Member, tensors: Any, *, version: int = 0, positions: tuple[int, int], **changes: Any
) -> Part:
    """A delta of all zeros but what `tensors` says, for these positions."""
    start, stop = positions
    fields: dict[str, Any] = {
        "member": member,
        "kind": "delta",
        "fragment": 0,
        "seq": version,
        "base_version": version,
        "from_step": 0,
        "to_step": 3,
        "tokens": (stop - start) * 16,
        "steps": 3,
        "ranges": RangeSet([positions]),
        "rows": pack({name: (0, rows) for name, rows in tensors.items()}, "fp32"),
    }
    return Part(**fields | changes)


def _both_in(lab: Any, job: Any, **setup: Any) -> tuple[Synchronizer, Entry]:
    """A synchronizer with eu and us let in, and the entry of one of them."""
    synchronizer = lab.synchronizer(job, **setup)
    hellos = [lab.hello(job, name) for name in ("eu", "us")]
    assert [synchronizer.join(hello) for hello in hellos] == [1, 1]
    entry, _ = (_enter(synchronizer, hello) for hello in hellos)
    return synchronizer, entry


def _values(wire: Wire) -> dict[str, Any]:
    return {name: torch.from_numpy(array.copy()) for name, (_, array) in wire.arrays.items()}


# ------------------------------------------------------------------------------- who may join


def test_an_island_with_another_model_is_refused_with_a_table(lab: Any) -> None:
    """Other parameters or another minor version of torch: refused at join, all differences in one table."""
    job = lab.job()
    synchronizer = lab.synchronizer(job)
    ours = library_versions()
    major, minor, *_ = ours["torch"].split("+")[0].split(".")
    other = f"{major}.{int(minor) + 1}.0"
    hello = lab.hello(job, "us", parameters="f00f", versions={**ours, "torch": other})
    with pytest.raises(ConfigError) as caught:
        synchronizer.join(hello)
    first, titles, *rows, fix = str(caught.value).splitlines()
    assert first == "island us does not fit this run"
    assert titles.split() == ["island", "run"]
    assert [row.split() for row in rows] == [
        ["torch", other, ours["torch"]],
        ["parameters", "f00f", lab.hello(job, "us").parameters],
    ]
    assert fix.startswith("  fix: ")
    assert synchronizer.snapshot().joined == ()


def test_patch_levels_and_builds_may_differ() -> None:
    """2.13.0+cpu and 2.13.1+cu128 agree, 2.13 and 2.12 do not, and a missing library does not."""
    ours = {"torch": "2.13.0+cpu", "elastic": "0.1.0"}
    assert version_differences({"torch": "2.13.1+cu128", "elastic": "0.1.5"}, ours) == []
    assert version_differences({"torch": "2.12.0+cpu"}, ours) == [
        ("torch", "2.12.0+cpu", "2.13.0+cpu"),
        ("elastic", "missing", "0.1.0"),
    ]


def test_an_island_of_another_run_is_refused(lab: Any) -> None:
    """A name that the fleet does not have cannot join; the message says which names there are."""
    job = lab.job()
    with pytest.raises(ConfigError, match="island asia is not part of this run; its islands: eu, us"):
        lab.synchronizer(job).join(lab.hello(job, "asia"))


def test_nobody_is_let_in_before_all_have_joined_or_begin_is_said(lab: Any) -> None:
    """The first islands wait for the rest, until the controller lets the run begin without it."""
    job = lab.job()
    synchronizer = lab.synchronizer(job)
    hello = lab.hello(job, "eu")
    synchronizer.join(hello)
    assert synchronizer.enter(_member("eu"), hello, 0.05) is None
    synchronizer.begin()
    entry = _enter(synchronizer, hello)
    assert (entry.versions[0], entry.claimed, len(entry.leased)) == (0, False, 0)
    assert digest(_values(entry.tensors)) == entry.digest == synchronizer.snapshot().digest
    assert synchronizer.snapshot().live == ("eu",)


# ------------------------------------------------------------------------------------ fencing


def test_messages_of_an_older_generation_are_refused(lab: Any) -> None:
    """After a newer join nothing of the old incarnation is heard: leases, deltas, beats, judgements."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)
    work = synchronizer.lease(_member("us"), (0,))
    assert synchronizer.join(lab.hello(job, "us")) == 2
    old = _member("us", 1)
    part = _part(old, _values(entry.tensors), positions=(work.start, work.start + 4))
    for call in (
        lambda: synchronizer.offer(part),
        lambda: synchronizer.lease(old, (0,)),
        lambda: synchronizer.fetch(old, "version", 0, 1, 0.0),
        lambda: synchronizer.enter(old, lab.hello(job, "us"), 0.0),
    ):
        with pytest.raises(FencedError, match="generation 1 of island us is over, 2 is current") as caught:
            call()
        assert caught.value.superseded
    assert "generation 1 of island us is over" in synchronizer.beat(old, BEAT).fenced
    synchronizer.leave(old, "done")
    assert synchronizer.board.membership.state("us") in ("idle", "live")
    synchronizer.board.ledger.check()
    assert ("us", 1) not in synchronizer.board.ledger.leased


def test_a_lost_island_may_join_again(lab: Any) -> None:
    """Given up, but without a successor: its messages are refused, and it is told that it may come back."""
    job = lab.job()
    synchronizer, _ = _both_in(lab, job)
    synchronizer.lease(_member("us"), (0,))
    synchronizer.declare_lost("us", "its node is gone")
    with pytest.raises(FencedError, match="was given up: its node is gone") as caught:
        synchronizer.lease(_member("us"), (0,))
    assert not caught.value.superseded
    (lost,) = [fields for kind, fields in lab.facts if kind == "island_lost"]
    assert (lost["island"], lost["generation"], lost["reason"]) == ("us", 1, "its node is gone")
    assert lost["returned_sequences"] == 16
    assert synchronizer.join(lab.hello(job, "us")) == 2
    assert [kind for kind, _ in lab.facts].count("island_lost") == 1


def test_a_silent_island_is_lost_and_nobody_waits_for_it(lab: Any) -> None:
    """Without a beat for `island_timeout_s` an island leaves the open round, which then closes."""
    job = lab.job(outer={"island_timeout_s": 1.0})
    synchronizer, entry = _both_in(lab, job)
    work = synchronizer.lease(_member("eu"), (0,))
    synchronizer.offer(_part(_member("eu"), _values(entry.tensors), positions=(work.start, work.start + 4)))

    def closed() -> bool:
        synchronizer.beat(_member("eu"), BEAT)
        return synchronizer.snapshot().version == 1

    lab.until(closed)
    assert synchronizer.snapshot().live == ("eu",)
    (lost,) = [fields for kind, fields in lab.facts if kind == "island_lost"]
    assert "silent for" in str(lost["reason"])


def test_an_island_that_is_out_of_data_still_beats(lab: Any) -> None:
    """Waiting for the others at the end is not death: the idle island is told to wait, and counts as in."""
    job = lab.job(sequences=10)
    synchronizer, _ = _both_in(lab, job)
    assert synchronizer.lease(_member("eu"), (0,)).do == "batches"
    assert synchronizer.lease(_member("us"), (0,)).do == "wait"
    assert synchronizer.snapshot().live == ("eu",)
    assert synchronizer.beat(_member("us"), BEAT).fenced == ""
    assert synchronizer.lease(_member("us"), (0,)).do == "wait"


# ----------------------------------------------------------------------------------- rounds


def test_a_round_by_hand(lab: Any) -> None:
    """Deltas of 12 and 4 sequences: the published step is lr * (d + mu * d), d the mean by tokens."""
    job = lab.job(outer={"lr": 0.5, "momentum": 0.8})
    synchronizer, entry = _both_in(lab, job)
    base = _values(entry.tensors)
    for name, size, filled in (("eu", 12, 1.0), ("us", 4, -2.0)):
        start = synchronizer.lease(_member(name), (0,)).start
        delta = {key: rows * 0 + filled for key, rows in base.items()}
        receipt = synchronizer.offer(_part(_member(name), delta, positions=(start, start + size)))
        assert receipt.status == "accepted"
    packet = synchronizer.fetch(_member("us"), "version", 0, 1, 10.0)
    assert isinstance(packet, Packet)
    d = (12 * 1.0 + 4 * -2.0) / 16
    step = 0.5 * (d + 0.8 * d)
    for key, rows in _values(packet.tensors).items():
        assert float((rows - (base[key] - step)).abs().max()) <= 1e-6
    assert packet.digest == synchronizer.snapshot().digest
    assert packet.basis.committed_tokens == 16 * 16
    assert synchronizer.snapshot().committed_sequences == 16


def test_repeated_and_partial_contributions(lab: Any) -> None:
    """A repeated part counts once; an island of two ranks is in when both parts are."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    synchronizer.lease(_member("eu"), (0,))
    parts = []
    for rank in (0, 1):
        rows = {
            key: (0, value[: len(value) // 2]) if rank == 0 else (len(value) // 2, value[len(value) // 2 :])
            for key, value in zeros.items()
        }
        part = _part(_member("eu", rank=rank, world_size=2), zeros, positions=(0, 4))
        parts.append(dataclasses.replace(part, rows=pack(rows, "fp32")))
    assert synchronizer.offer(parts[0]).status == "waiting-parts"
    assert synchronizer.offer(parts[0]).status == "duplicate"
    assert synchronizer.offer(parts[1]).status == "accepted"
    start = synchronizer.lease(_member("us"), (0,)).start
    synchronizer.offer(_part(_member("us"), zeros, positions=(start, start + 4)))
    assert isinstance(synchronizer.fetch(_member("us"), "version", 0, 1, 10.0), Packet)
    assert synchronizer.offer(parts[1]).status == "duplicate"
    assert synchronizer.snapshot().digest == entry.digest


def test_parts_of_a_lost_island_are_dropped(lab: Any) -> None:
    """One of two ranks sent its rows, then the island died: the round closes without it, data goes back."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    synchronizer.lease(_member("us"), (0,))
    half = _part(_member("us", rank=0, world_size=2), zeros, positions=(16, 20))
    assert synchronizer.offer(half).status == "waiting-parts"
    synchronizer.lease(_member("eu"), (0,))
    synchronizer.offer(_part(_member("eu"), zeros, positions=(0, 4)))
    synchronizer.declare_lost("us", "killed")
    assert isinstance(synchronizer.fetch(_member("eu"), "version", 0, 1, 10.0), Packet)
    board = synchronizer.board
    assert board.ledger.committed == RangeSet([(0, 4)])
    assert board.ledger.returned == RangeSet([(16, 32)])
    assert board.parts == {}
    board.ledger.check()


def test_a_refused_delta_returns_its_data(lab: Any) -> None:
    """A delta announced as not finite is refused by name, and its positions are free again."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)
    work = synchronizer.lease(_member("us"), (0,))
    part = _part(_member("us"), _values(entry.tensors), positions=(work.start, work.start + 4))
    receipt = synchronizer.offer(dataclasses.replace(part, rows=Wire("fp32", {}), finite=False))
    assert receipt.status == "refused"
    assert receipt.reason == "contribution us/1/0/0, rank 0: its values are not finite"
    assert synchronizer.board.ledger.returned == RangeSet([(work.start, work.stop)])
    assert ("refused", "us/1/0/0") in [(kind, fields.get("id")) for kind, fields in lab.facts]
    assert synchronizer.snapshot().live == ("eu",)


def test_a_delta_of_an_older_version_is_refused(lab: Any) -> None:
    """A contribution that starts from a version that was replaced is refused, with both numbers."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    for name in ("eu", "us"):
        start = synchronizer.lease(_member(name), (0,)).start
        synchronizer.offer(_part(_member(name), zeros, positions=(start, start + 4)))
    synchronizer.fetch(_member("us"), "version", 0, 1, 10.0)
    late = _part(_member("us"), zeros, positions=(20, 24), seq=7)
    receipt = synchronizer.offer(late)
    assert receipt.status == "refused"
    assert receipt.reason == "us/1/0/7 starts from version 0, 1 is current"


# ------------------------------------------------------------------------------------- claims


def test_a_restarted_island_goes_on_from_its_checkpoint(lab: Any) -> None:
    """At the version it trained from: what it trained and what it had leased are its own again, at once."""
    job = lab.job()
    synchronizer, _ = _both_in(lab, job)
    synchronizer.lease(_member("us"), (0,))  # positions 16..32
    synchronizer.declare_lost("us", "killed")
    held, rest = RangeSet([(16, 24)]), RangeSet([(24, 32)])
    hello = lab.hello(job, "us", step=2, bases=(0,), pending=(held,), rest=rest)
    assert synchronizer.join(hello) == 2
    entry = _enter(synchronizer, hello, 2)
    assert (entry.claimed, entry.leased) == (True, rest)
    assert synchronizer.board.ledger.held("us", 2) == held | rest


def test_an_older_checkpoint_keeps_its_lease_only(lab: Any) -> None:
    """The version has moved on: the island re-bases, and may still train what it had leased."""
    job = lab.job()
    synchronizer, first = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(first.tensors).items()}
    for name in ("eu", "us"):
        start = synchronizer.lease(_member(name), (0,)).start
        synchronizer.offer(_part(_member(name), zeros, positions=(start, start + 12)))
    synchronizer.fetch(_member("eu"), "version", 0, 1, 10.0)
    synchronizer.leave(_member("us"), "stopped")
    synchronizer.leave(_member("eu"), "stopped")
    held, rest = RangeSet([(16, 28)]), RangeSet([(28, 32)])
    hello = lab.hello(job, "us", step=3, bases=(0,), pending=(held,), rest=rest)
    synchronizer.join(hello)
    entry = _enter(synchronizer, hello, 2)
    assert (entry.versions[0], entry.claimed, entry.leased) == (1, False, rest)


def test_what_others_train_by_now_cannot_be_claimed(lab: Any) -> None:
    """Another island has taken a part of the old lease: no progress is kept, the rest of the lease is."""
    job = lab.job()
    synchronizer, _ = _both_in(lab, job)
    synchronizer.lease(_member("us"), (0,))  # 16..32
    synchronizer.lease(_member("eu"), (0,))  # 0..16
    synchronizer.declare_lost("us", "killed")
    assert synchronizer.lease(_member("eu"), (0,)).start == 16
    held, rest = RangeSet([(16, 24)]), RangeSet([(24, 40)])
    hello = lab.hello(job, "us", step=2, bases=(0,), pending=(held,), rest=rest)
    synchronizer.join(hello)
    board = synchronizer.board
    assert board.claims["us"] is None
    assert board.ledger.held("us", 2) == RangeSet([(32, 40)])
    board.ledger.check()


def test_nobody_enters_a_stretch_of_the_warm_up(lab: Any) -> None:
    """Between two anchors an island would hold older parameters than the rest: it waits for the next one.

    When the others are lost meanwhile, the stretch is redone with it, and its lease is still its own.
    """
    job = lab.job(preset="synchronous", outer={"sync_every": 100})
    synchronizer, entry = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    for name in ("eu", "us"):
        start = synchronizer.lease(_member(name), (0,)).start
        step = {"kind": "gradient", "seq": 1, "steps": 1, "to_step": 1}
        synchronizer.offer(_part(_member(name), zeros, positions=(start, start + 4), **step))
    assert isinstance(synchronizer.fetch(_member("eu"), "gradient", 0, 1, 10.0), Packet)
    synchronizer.declare_lost("us", "killed")
    rest = RangeSet([(20, 32)])
    hello = lab.hello(job, "us", bases=(0,), pending=(RangeSet(),), rest=rest)
    assert synchronizer.join(hello) == 2
    assert synchronizer.enter(_member("us", 2), hello, 0.3) is None
    synchronizer.declare_lost("eu", "killed")
    entry = _enter(synchronizer, hello, 2)
    assert (entry.versions[0], entry.claimed, entry.leased, entry.gradient_step) == (0, False, rest, 1)
    board = synchronizer.board
    assert board.ledger.held("us", 2) == rest
    assert board.ledger.committed == RangeSet()
    board.ledger.check()
    assert ("warning", "no island is left in the synchronous phase: 1 steps are redone") in [
        (kind, fields.get("what")) for kind, fields in lab.facts
    ]


def test_a_gradient_that_is_redone_has_a_number_of_its_own(lab: Any) -> None:
    """Carriers keep packets by number: a step that is redone is never mistaken for the first try."""
    job = lab.job(preset="synchronous", outer={"sync_every": 100})
    synchronizer, entry = _both_in(lab, job)
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    numbers = []
    for generation in (1, 2):
        seq = 1 if generation == 1 else entry.gradient_step + 1
        for name in ("eu", "us"):
            start = synchronizer.lease(_member(name, generation), (0,)).start
            step = {"kind": "gradient", "seq": seq, "base_version": seq - 1, "steps": 1, "to_step": 1}
            part = _part(_member(name, generation), zeros, positions=(start, start + 4), **step)
            assert synchronizer.offer(part).status == "accepted"
        packet = synchronizer.fetch(_member("eu", generation), "gradient", 0, seq, 10.0)
        assert isinstance(packet, Packet)
        numbers.append(packet.number)
        if generation == 1:
            for name in ("eu", "us"):
                synchronizer.declare_lost(name, "killed")
            hellos = [lab.hello(job, name) for name in ("eu", "us")]
            assert [synchronizer.join(hello) for hello in hellos] == [2, 2]
            entry, _ = (_enter(synchronizer, hello, 2) for hello in hellos)
    assert numbers == [1, 2]


# ------------------------------------------------------------------------------------ its end


def test_what_the_storage_refuses_ends_the_run_resumably(lab: Any) -> None:
    """A record that cannot be written is never published: islands are told, the controller sees why."""
    job = lab.job()
    synchronizer, entry = _both_in(lab, job)

    def refuse(*arguments: Any) -> None:
        raise StorageError("the bucket is away", saw="503")

    synchronizer.store.log.append = refuse  # type: ignore[method-assign, assignment]
    zeros = {key: rows * 0 for key, rows in _values(entry.tensors).items()}
    for name in ("eu", "us"):
        start = synchronizer.lease(_member(name), (0,)).start
        synchronizer.offer(_part(_member(name), zeros, positions=(start, start + 4)))
    lab.until(lambda: synchronizer.snapshot().failure)
    view = synchronizer.snapshot()
    assert view.storage_failed
    assert "the bucket is away" in view.failure
    assert (view.version, view.committed_sequences, view.digest) == (0, 0, entry.digest)
    with pytest.raises(RuntimeError, match="cannot go on: the bucket is away"):
        synchronizer.fetch(_member("eu"), "version", 0, 1, 0.0)


def test_events_are_handed_out_once(lab: Any) -> None:
    """The controller fetches events by cursor: each once, in order."""
    job = lab.job()
    synchronizer, _ = _both_in(lab, job)
    cursor, events = synchronizer.events_since(0)
    assert [event["kind"] for event in events] == ["island_joined", "island_joined"]
    assert synchronizer.events_since(cursor) == (cursor, [])
    synchronizer.declare_lost("us", "killed")
    assert [event["kind"] for event in synchronizer.events_since(cursor)[1]] == ["island_lost"]


def test_stopping_tells_every_island(lab: Any) -> None:
    """After `stop` beats and leases say so."""
    synchronizer, _ = _both_in(lab, lab.job())
    assert not synchronizer.beat(_member("eu"), BEAT).stop
    synchronizer.stop("SIGTERM")
    assert synchronizer.beat(_member("eu"), BEAT).stop
    assert synchronizer.lease(_member("us"), (0,)).do == "stop"
    assert dict(synchronizer.snapshot().beats) == {"eu": BEAT}
