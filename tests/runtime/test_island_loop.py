"""Whole runs of the island's loop: what it starts from, what it equals, what it repeats."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.base.config import Job
from elastic.exchange.link import Link, Packet, Part
from elastic.exchange.wire import Wire
from elastic.policy.schedule import lr_at
from elastic.runtime.island_rank import IslandRank
from elastic.state.initial import initial_parameters
from elastic.state.replay import files_of, load_snapshot
from elastic.training.digest import digest
from elastic.training.order import Order

pytestmark = pytest.mark.unit

UNIT_ROUNDOFF = 2.0**-24
"""Half a unit in the last place of fp32, relative."""


def _plain(lab: Any, job: Job) -> dict[str, Tensor]:
    """Plain training: the same order, batches and learning rates, no synchronizer anywhere."""
    inner, order = lab.inner(job), Order(len(lab.corpus.train), job.seed)
    total = lab.setup(job).total_sequences
    for start in range(0, total, 4):
        inner.gradient(lab.corpus.train.take(order.sequences(start, min(start + 4, total))))
        inner.clip()
        inner.step(lr_at(min(1.0, (start + 4) / total), job.inner))
    return {name: rows.clone() for name, rows in inner.local().items()}


def test_all_islands_start_from_identical_parameters(lab: Any) -> None:
    """What islands hold before their first step is version 0 of the run, whatever they were built with."""

    def scramble(rank: IslandRank) -> None:
        for rows in rank.local().values():
            rows.fill_(float(len(rank.name)))

    job = lab.job(sequences=48)
    run = lab.run(job, ("a", "bb", "ccc"), tamper=dict.fromkeys(("a", "bb", "ccc"), scramble)).finished(48)
    joined = run.events("island_joined")
    start = digest(initial_parameters(job, lab.corpus.info.vocab_size))
    assert [(event["version"], event["digest"]) for event in joined] == [(0, start)] * 3
    (file,) = files_of(run.records[0])
    assert digest(load_snapshot(run.storage, file.stored)[0].published) == start


@pytest.mark.parametrize("sync_every", [2, 5, 7])
def test_one_averaging_island_is_plain_training(lab: Any, sync_every: int) -> None:
    """With one island, `average` and fp32, a run is plain training up to rounding, whatever H.

    Adopting `base - (base - local)` instead of `local` rounds twice, so each value moves by at most
    u * (|base - local| * (1 + u) + |local|) per outer step, u = 2**-24: one unit in the last place.
    Training carries that on; after these 23 steps all values are within 1e-6 (2.4e-7 when measured).
    """
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]] = []

    def watch(rank: IslandRank) -> None:
        rank.link = Watched(rank, rank.link)

    class Watched:
        """Keeps base, local and published values of every outer step."""

        def __init__(self, rank: IslandRank, link: Link) -> None:
            self.rank, self.link = rank, link

        def __getattr__(self, name: str) -> Any:
            return getattr(self.link, name)

        def offer(self, part: Part) -> Any:
            phase: Any = self.rank.phase
            copies = [
                {n: rows.clone() for n, rows in held.items()} for held in (phase.base, self.rank.local())
            ]
            self.pending = copies
            return self.link.offer(part)

        def fetch(self, *arguments: Any) -> Any:
            packet = self.link.fetch(*arguments)
            if isinstance(packet, Packet):
                published = as_fp32(packet.tensors)
                seen.append((self.pending[0], self.pending[1], published))
            return packet

    job = lab.job(sequences=90, preset="average", outer={"sync_every": sync_every})
    run = lab.run(job, ("eu",), tamper={"eu": watch}).finished(90)
    assert len(seen) == run.snapshot.counters["outer_steps"] == -(-23 // sync_every)
    for base, local, published in seen:
        for name, y in local.items():
            b, exact = base[name].double(), y.double()
            bound = UNIT_ROUNDOFF * ((b - exact).abs() * (1 + UNIT_ROUNDOFF) + exact.abs())
            assert ((published[name].double() - exact).abs() <= bound).all(), name
    plain, theta = _plain(lab, job), run.state.states[0].theta
    worst = max(float((plain[name] - theta[name]).abs().max()) for name in plain)
    assert worst <= 1e-6


@pytest.mark.parametrize("islands", [("eu", "us"), ("a", "b", "c")])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_two_runs_publish_identical_digests(lab: Any, islands: tuple[str, ...], codec: str) -> None:
    """Under quorum all every version of two runs has the same digest, however fast the islands are."""
    outer = {"warmup": 0.3, "codec_up": codec, "codec_down": codec}
    job = lab.job(sequences=150, outer=outer)  # a ragged end: 150 is no multiple of a batch

    def slow(rank: IslandRank) -> None:
        gradient = rank.inner.gradient

        def late(batch: Any) -> Any:
            time.sleep(0.004)
            return gradient(batch)

        rank.inner.gradient = late  # type: ignore[method-assign]

    once = lab.run(job, islands, folder="once").finished(150)
    again = lab.run(job, islands, folder="again", tamper={islands[0]: slow}).finished(150)
    assert once.snapshot.counters["synchronous_steps"] > 0
    assert once.snapshot.counters["outer_steps"] > 2
    assert once.digests == again.digests
    assert once.snapshot.validation == again.snapshot.validation


def test_islands_hold_what_was_published(lab: Any) -> None:
    """After every outer step the islands' values have the digest of the durable version."""
    run = lab.run(lab.job(outer={"codec_down": "bf16", "warmup": 0.25})).finished(96)
    adopted = run.events("adopted")
    assert {event["island"] for event in adopted} == {"eu", "us"}
    assert len(adopted) == 2 * len(run.digests)
    assert all(event["digest"] == run.digests[event["version"]] for event in adopted)


def test_the_learning_rate_is_one_function_of_progress(lab: Any) -> None:
    """Every step of every island uses the rate of (committed + own steps x planned tokens) / budget.

    Also at the first step after a resume, where it goes on as if nothing had happened.
    """
    rates: dict[str, list[tuple[int, int, float]]] = {}

    def watch(rank: IslandRank) -> None:
        step = rank.inner.step
        noted = rates.setdefault(rank.name, [])

        def call(lr: float) -> None:
            noted.append((rank.phase.version, rank.phase.steps_since, lr))
            step(lr)

        rank.inner.step = call  # type: ignore[method-assign]

    job = lab.job(sequences=160, inner={"warmup_share": 0.2, "lr": 0.01, "batch_sequences": 4})
    tamper = {"eu": watch, "us": watch}
    whole = lab.run(job, folder="whole", tamper=tamper).finished(160)
    undisturbed, rates = rates, {}
    lab.run(job, folder="cut", tamper=tamper, stop_when=lambda view: view.version >= 2)
    resumed = lab.run(job, folder="cut", tamper=tamper).finished(160)
    assert rates == undisturbed
    assert rates["eu"] == rates["us"]
    assert whole.digests == resumed.digests
    for version, steps_since, lr in rates["us"]:
        committed = 24 * version  # every version commits 2 islands x 3 steps x 4 sequences
        expected = lr_at((committed + (steps_since + 1) * 8) / 160, job.inner)
        assert lr == pytest.approx(expected, rel=1e-12)


def test_another_budget_moves_the_schedule(lab: Any) -> None:
    """A continued run with a larger budget computes its rates from the larger budget at once."""
    rates: list[float] = []

    def watch(rank: IslandRank) -> None:
        step = rank.inner.step

        def call(lr: float) -> None:
            rates.append(lr)
            step(lr)

        rank.inner.step = call  # type: ignore[method-assign]

    lab.run(lab.job(sequences=48), ("eu",)).finished(48)
    larger = lab.job(sequences=96)
    lab.run(larger, ("eu",), tamper={"eu": watch}).finished(96)
    assert rates[0] == pytest.approx(lr_at(52 / 96, larger.inner))


def test_a_damaged_transfer_is_noticed(lab: Any) -> None:
    """An island that received other values than were published fails by name instead of training."""

    def damage(rank: IslandRank) -> None:
        enter = rank.link.enter

        def call(*arguments: Any) -> Any:
            entry = enter(*arguments)
            if entry is None:
                return None
            arrays = {name: (start, array.copy()) for name, (start, array) in entry.tensors.arrays.items()}
            next(iter(arrays.values()))[1].flat[0] += 1.0
            return dataclasses.replace(entry, tensors=dataclasses.replace(entry.tensors, arrays=arrays))

        rank.link = type("Damaged", (), {"enter": staticmethod(call), "__getattr__": _of(rank.link)})()

    run = lab.run(lab.job(sequences=24), tamper={"us": damage})
    run.finished(24, errors=("us",))
    assert "the transfer is damaged" in str(run.outcome.errors["us"])


def _of(link: Link) -> Any:
    return lambda self, name: getattr(link, name)


def test_moments_go_on_after_a_resume(lab: Any) -> None:
    """Ten steps of one island equal five, a stop and five more, and differ from a cold optimiser."""
    job = lab.job(sequences=40, preset="average", outer={"sync_every": 5})
    whole = lab.run(job, ("eu",), folder="whole").finished(40)

    def stop(rank: IslandRank) -> None:
        rank.link.stop("test")  # type: ignore[attr-defined]
        lab.until(lambda: rank.heart.stop_asked)

    lab.run(job, ("eu",), folder="cut", tamper={"eu": lab.after_step(5, stop)})
    cut = lab.run(job, ("eu",), folder="cut").finished(40)
    assert cut.digests == whole.digests
    moments = [
        digest({n: pair[0] for n, pair in r.ranks["eu"][0].inner.moments().items()}) for r in (whole, cut)
    ]
    assert moments[0] == moments[1]

    def forget(rank: IslandRank) -> None:
        load = rank.inner.load_moments
        zeros = {n: (torch.zeros_like(a), torch.zeros_like(b)) for n, (a, b) in rank.inner.moments().items()}
        rank.inner.load_moments = lambda moments, steps: load(zeros, 0)  # type: ignore[method-assign]

    lab.run(job, ("eu",), folder="cold", tamper={"eu": lab.after_step(5, stop)})
    cold = lab.run(job, ("eu",), folder="cold", tamper={"eu": forget}).finished(40)
    assert cold.digests != whole.digests


def as_fp32(wire: Wire) -> dict[str, Tensor]:
    """Whole tensors of an fp32 wire."""
    return {name: torch.from_numpy(array.copy()) for name, (_, array) in wire.arrays.items()}
