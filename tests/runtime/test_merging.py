"""What travels, what is judged, and what the records say of a merge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastic.base.ranges import RangeSet
from elastic.exchange.link import Judgement, Member
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.merging import island_digests
from elastic.training.digest import digest, partial_digest

pytestmark = pytest.mark.unit


def _sizes(lab: Any, job: Any) -> tuple[int, int]:
    """Numbers in matrices, and in tensors of one dimension."""
    shapes = lab.inner(job).shapes.values()
    matrices = sum(int(np.prod(shape)) for shape in shapes if len(shape) >= 2)
    return matrices, sum(int(np.prod(shape)) for shape in shapes) - matrices


def test_bytes_up_and_down_are_the_payload(lab: Any) -> None:
    """Counters equal a count by hand: gradients, one anchor, deltas in bf16, versions in fp32, entries."""
    job = lab.job(sequences=96, outer={"warmup": 0.25, "codec_up": "bf16"})
    counters = lab.run(job).finished(96).snapshot.counters
    matrices, vectors = _sizes(lab, job)
    whole, bf16 = 4 * (matrices + vectors), 2 * matrices + 4 * vectors
    steps, anchors, outer, islands = 3, 1, 3, 2
    assert (counters["synchronous_steps"], counters["outer_steps"]) == (steps, outer)
    assert counters["bytes_up_warmup"] == islands * steps * whole + anchors * 3 * whole
    assert counters["bytes_down_warmup"] == islands * whole + islands * steps * whole
    assert counters["bytes_up"] - counters["bytes_up_warmup"] == islands * outer * bf16
    assert counters["bytes_down"] - counters["bytes_down_warmup"] == islands * outer * whole


def test_bytes_after_a_resume_in_the_warm_up(lab: Any) -> None:
    """Versions in bf16 count half; entering the warm-up again costs parameters and moments."""
    job = lab.job(sequences=96, outer={"warmup": 0.5, "codec_down": "bf16", "sync_every": 4})
    matrices, vectors = _sizes(lab, job)
    whole, bf16 = 4 * (matrices + vectors), 2 * matrices + 4 * vectors

    def ask(rank: IslandRank) -> None:
        rank.link.stop("test")  # type: ignore[attr-defined]

    lab.run(job, ("eu",), tamper={"eu": lab.before_step(2, ask)})
    run = lab.run(job, ("eu",)).finished(96)
    steps, outer = run.snapshot.counters["synchronous_steps"], run.snapshot.counters["outer_steps"]
    anchors = len([record for record in run.records if record.kind == "anchor"])
    assert (steps, outer) == (12, 3)
    counters = run.snapshot.counters
    assert counters["bytes_up"] == steps * whole + anchors * 3 * whole + outer * whole
    assert counters["bytes_down"] == whole + 3 * whole + steps * whole + outer * bf16
    assert counters["bytes_down_warmup"] == whole + 3 * whole + steps * whole


def test_the_last_validation_is_spread_and_equals_one_piece(lab: Any) -> None:
    """Both islands judge chunks of the held-out text; together that is the loss of the published values."""
    judged: dict[str, list[tuple[int, int]]] = {"eu": [], "us": []}

    def watch(rank: IslandRank) -> None:
        link: Any = rank.link
        judgement = link.judged
        evaluate = rank.inner.evaluate

        def wait_for_the_other(batch: Any) -> Any:
            # So that it does not depend on speed who takes how much: each keeps its first chunk for a while.
            lab.until(lambda: len(link.board.evaluation._held) + len(link.board.evaluation._sums) >= 2)
            return evaluate(batch)

        def call(member: Member, judgement_: Judgement) -> None:
            judged[rank.name].append((judgement_.start, judgement_.stop))
            judgement(member, judgement_)

        rank.inner.evaluate = wait_for_the_other  # type: ignore[method-assign]
        rank.link = type("Watched", (), {"__getattr__": lambda self, name: getattr(link, name)})()
        rank.link.judged = call  # type: ignore[method-assign]

    job = lab.job(sequences=48, validation={"every": 1000})
    run = lab.run(job, tamper={"eu": watch, "us": watch}).finished(48)
    count = len(lab.corpus.validation)
    assert 64 < count <= 128
    assert sorted(judged["eu"] + judged["us"]) == [(0, 64), (64, count)]
    assert all(judged.values())
    inner = lab.inner(job)
    for name, rows in inner.local().items():
        rows.copy_(run.state.states[0].published[name])
    loss_sum, tokens = inner.evaluate(lab.corpus.validation.take(np.arange(count)))
    result = run.snapshot.validation
    assert result["loss"] == pytest.approx(loss_sum / tokens, rel=1e-6)
    assert result["nats_per_byte"] == pytest.approx(
        result["loss"] * lab.corpus.info.validation.tokens_per_byte, rel=1e-12
    )
    assert (result["sequences"], result["version"]) == (count, run.snapshot.version)
    assert len([record for record in run.records if record.kind == "validation"]) == 1


def test_a_validation_on_the_way_judges_the_version_it_names(lab: Any) -> None:
    """Every second version is judged on the same fixed sample, by the islands in turn."""
    run = lab.run(lab.job(sequences=128, validation={"every": 2, "sequences": 8})).finished(128)
    on_the_way = [event for event in run.events("validated") if not event["final"]]
    assert [event["version"] for event in on_the_way] == [2, 4]
    assert {event["sequences"] for event in on_the_way} == {8}
    (last,) = [event for event in run.events("validated") if event["final"]]
    assert last["version"] == run.snapshot.version == 6


def test_a_repeated_judgement_changes_nothing(lab: Any) -> None:
    """A chunk that is judged twice, as after a lost answer, is counted once and recorded once."""

    def repeat(rank: IslandRank) -> None:
        link: Any = rank.link
        judged = link.judged

        def call(member: Member, judgement: Judgement) -> None:
            judged(member, judgement)
            judged(member, judgement)

        rank.link = type("Repeating", (), {"__getattr__": lambda self, name: getattr(link, name)})()
        rank.link.judged = call  # type: ignore[method-assign]

    run = lab.run(lab.job(sequences=24, validation={"every": 1000}), ("eu",), tamper={"eu": repeat}).finished(
        24
    )
    assert [record.kind for record in run.records].count("validation") == 1


def test_records_name_every_contribution_and_its_weight(lab: Any) -> None:
    """Weights of a record sum to one and are the tokens' shares; its ranges are what it commits."""
    run = lab.run(lab.job(sequences=150, outer={"warmup": 0.3}), ("a", "b", "c")).finished(150)
    for record in run.steps:
        entries = record.body["contributions"]
        tokens = sum(entry["tokens"] for entry in entries)
        assert [entry["weight"] for entry in entries] == [entry["tokens"] / tokens for entry in entries]
        assert [entry["island"] for entry in entries] == sorted(entry["island"] for entry in entries)
        ranges = [RangeSet.from_json(entry["ranges"]) for entry in entries]
        together = RangeSet(pair for each in ranges for pair in each)
        assert together == RangeSet.from_json(record.body["committed"])
        assert sum(len(each) for each in ranges) == len(together) == tokens // 16
        for entry, each in zip(entries, ranges, strict=True):
            assert entry["tokens"] == 16 * len(each)
            assert entry["to_step"] - entry["from_step"] == entry["steps"]


def test_the_sums_of_ranks_are_the_digests_of_the_island() -> None:
    """Partial sums of parameters and of moments add up, over ranks, to the digests of the whole."""
    import torch

    whole, moment = torch.arange(12.0).reshape(6, 2), torch.linspace(-1, 1, 12).reshape(6, 2)
    sums = {}
    for rank, (start, stop) in enumerate(((0, 4), (4, 6))):
        parts = [
            partial_digest({name: (start, rows[start:stop])}) for name, rows in (("w", whole), ("m", moment))
        ]
        sums[rank] = torch.cat(parts).tolist()
    assert island_digests(sums) == (digest({"w": whole}), digest({"m": moment}))
