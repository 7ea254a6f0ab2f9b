"""The synchronous phase is data parallel training over islands, and the outer phase is DiLoCo by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic.exchange.link import Packet
from elastic.exchange.wire import Wire
from elastic.policy.schedule import lr_at
from elastic.runtime.island_rank import IslandRank
from elastic.training.order import Order

pytestmark = pytest.mark.unit


def _worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def test_two_synchronous_islands_equal_one_with_twice_the_batch(lab: Any) -> None:
    """Merged gradients, parameters and moments are those of one batch of 8, within 1e-5, at every step."""
    merged: list[dict[str, Tensor]] = []

    def watch(rank: IslandRank) -> None:
        link = rank.link
        fetch = link.fetch

        def call(*arguments: Any) -> Any:
            packet = fetch(*arguments)
            if isinstance(packet, Packet) and arguments[1] == "gradient":
                merged.append(as_fp32(packet.tensors))
            return packet

        rank.link = type("Watched", (), {"__getattr__": lambda self, name: getattr(link, name)})()
        rank.link.fetch = call  # type: ignore[method-assign]

    job = lab.job(sequences=96, preset="synchronous", outer={"sync_every": 4})
    run = lab.run(job, tamper={"eu": watch}).finished(96)
    alone = lab.inner(job.model_copy(update={"inner": job.inner.model_copy(update={"batch_sequences": 8})}))
    order = Order(len(lab.corpus.train), job.seed)
    for step in range(12):
        # Blocks of 16 positions go to eu and us in turn; each takes batches of 4 of its own.
        block, part = divmod(step, 4)
        starts = [32 * block + 16 * island + 4 * part for island in (0, 1)]
        ids = np.concatenate([order.sequences(start, start + 4) for start in starts])
        alone.gradient(lab.corpus.train.take(ids))
        assert _worst(merged[step], alone.gradients()) <= 1e-5
        alone.clip()
        alone.step(lr_at((step + 1) * 8 / 96, job.inner))
    state = run.state
    assert _worst(state.states[0].theta, alone.local()) <= 1e-5
    moments = alone.moments()
    for index, name in enumerate(("exp_avg", "exp_avg_sq")):
        ours = {
            key.partition("/")[2]: value for key, value in state.moments.items() if key.startswith(f"{name}/")
        }
        assert _worst(ours, {key: pair[index] for key, pair in moments.items()}) <= 1e-5
    assert state.adam_steps == alone.steps == 12


def test_synchronous_islands_hold_the_same_bits_at_every_anchor(lab: Any) -> None:
    """Three islands, a ragged end: every island adopts every anchor with the digest of the record."""
    job = lab.job(sequences=106, preset="synchronous", outer={"sync_every": 2})
    run = lab.run(job, ("a", "b", "c")).finished(106)
    assert not run.events("island_lost")
    for event in run.events("adopted"):
        assert event["digest"] == run.digests[event["version"]]
    assert {event["island"] for event in run.events("adopted")} == {"a", "b", "c"}


@pytest.mark.parametrize("what", ["parameters", "moments"])
def test_an_island_that_drifts_in_the_warm_up_is_found_at_the_anchor(lab: Any, what: str) -> None:
    """One flipped bit in one island's parameters or moments: it is lost by name, and comes back clean."""

    def drift(rank: IslandRank) -> None:
        tensors = rank.inner.moments() if what == "moments" else {n: (t,) for n, t in rank.local().items()}
        rows = next(iter(tensors.values()))[-1].flatten()
        rows[0] = rows[0] * (1 + 2**-23) + 1e-30

    job = lab.job(sequences=96, preset="synchronous", outer={"sync_every": 2})
    run = lab.run(job, tamper={"us": lab.after_step(2, drift)}).finished(96)
    (lost,) = run.events("island_lost")
    assert lost["island"] == "us"
    assert lost["reason"].endswith(f"its {what} at version 1 are not those of island eu")
    assert run.outcome.endings == {"eu": "done", "us": "done"}
    adopted = [event for event in run.events("adopted") if event["island"] == "us"]
    assert adopted[-1]["version"] > 1
    assert all(event["digest"] == run.digests[event["version"]] for event in adopted)


def test_diloco_by_hand_with_unequal_work(lab: Any) -> None:
    """16 sequences against 5: weights are the tokens' shares, and the outer step is Nesterov's by hand."""
    job = lab.job(sequences=21, outer={"sync_every": 50, "lr": 0.7, "momentum": 0.9})
    run = lab.run(job).finished(21)
    (record,) = run.steps
    shares = {entry["island"]: (entry["tokens"], entry["steps"]) for entry in record.body["contributions"]}
    assert shares == {"eu": (16 * 16, 4), "us": (5 * 16, 2)}
    weights = [entry["weight"] for entry in record.body["contributions"]]
    assert weights == [16 / 21, 5 / 21]
    order = Order(len(lab.corpus.train), job.seed)
    base = {name: rows.clone() for name, rows in lab.inner(job).local().items()}
    deltas = []
    for start, stop in ((0, 16), (16, 21)):
        inner = lab.inner(job)
        for step, first in enumerate(range(start, stop, 4)):
            inner.gradient(lab.corpus.train.take(order.sequences(first, min(first + 4, stop))))
            inner.clip()
            inner.step(lr_at(min(1.0, (step + 1) * 8 / 21), job.inner))
        deltas.append({name: (base[name] - rows).double() for name, rows in inner.local().items()})
    state = run.state.states[0]
    for name, theta in base.items():
        d = (16 * deltas[0][name] + 5 * deltas[1][name]) / 21
        momentum = d  # from zero
        expected = theta.double() - 0.7 * (d + 0.9 * momentum)
        assert float((state.theta[name].double() - expected).abs().max()) <= 1e-6, name
        assert float((state.momentum[name].double() - momentum).abs().max()) <= 1e-6, name


def test_uniform_weights_are_equal_for_unequal_work(lab: Any) -> None:
    """With `weights: uniform`, 16 sequences and 5 count alike."""
    run = lab.run(lab.job(sequences=21, outer={"sync_every": 50, "weights": "uniform"})).finished(21)
    assert [entry["weight"] for entry in run.steps[0].body["contributions"]] == [0.5, 0.5]


def test_an_island_without_work_has_no_part_in_a_step(lab: Any) -> None:
    """An island that got no data is not in the record, and its weight is nothing."""
    run = lab.run(lab.job(sequences=10)).finished(10)
    contributions = [entry for record in run.steps for entry in record.body["contributions"]]
    assert {entry["island"] for entry in contributions} == {"eu"}
    assert sum(entry["tokens"] for entry in contributions) == 10 * 16
    assert all(entry["weight"] == 1.0 for entry in contributions)


def test_islands_train_from_their_own_moments_after_the_warm_up(lab: Any) -> None:
    """When the outer phase begins the moments of the warm-up stay, and both islands count the same steps."""
    run = lab.run(lab.job(sequences=96, outer={"warmup": 0.5})).finished(96)
    (changed,) = run.events("phase_changed")
    assert changed["islands"] == ["eu", "us"]
    assert changed["digest"] == run.digests[changed["version"]]
    steps = {name: ranks[0].inner.steps for name, ranks in run.ranks.items()}
    assert steps == {"eu": 12, "us": 12}
    assert not any(torch.isnan(rows).any() for rows in run.ranks["eu"][0].local().values())


def as_fp32(wire: Wire) -> dict[str, Tensor]:
    """Whole tensors of an fp32 wire."""
    return {name: torch.from_numpy(array.copy()) for name, (_, array) in wire.arrays.items()}
