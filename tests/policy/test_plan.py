"""The plan says what the run will do, by the rules the run itself uses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.config import Fleet, Job
from elastic.base.ranges import RangeSet
from elastic.base.resolve import resolve_job
from elastic.policy.ledger import Ledger
from elastic.policy.plan import block_sequences, deal, make_plan, total_sequences, warmup_sequences

pytestmark = pytest.mark.unit


def job(**fields):
    """A small job; dotted sections are given whole."""
    base = {
        "name": "small",
        "budget": {"tokens": 100_000},
        "model": {"kind": "decoder", "d_model": 64, "num_layers": 2, "num_heads": 4},
        "data": {"seq_len": 32},
        "inner": {"batch_sequences": 8},
        "outer": {"preset": "diloco", "sync_every": 10, "warmup": 0.25},
    }
    return resolve_job(Job.model_validate({**base, **fields})).value


def fleet(*names, **fields):
    """Islands of these names."""
    return Fleet(islands=[{"name": name, "region": f"r-{name}", **fields} for name in names])


def test_a_plan_by_hand():
    """Every figure of a small run, worked out."""
    plan = make_plan(job(), fleet("us", "eu"), num_train_sequences=1000)
    assert plan.total_sequences == 3125, "100,000 tokens over 32, rounded up"
    assert (plan.tokens, plan.epochs, plan.block_sequences) == (100_000, 3.125, 32)
    # 98 blocks, the last one of 21: eu has blocks 0, 2, .. 96, us has 1, 3, .. 97
    assert [(island.name, island.sequences) for island in plan.islands] == [("us", 1557), ("eu", 1568)]
    assert [island.inner_steps for island in plan.islands] == [195, 196]
    assert plan.inner_steps == 196
    # a quarter of 3125 sequences holds 4 periods of 2 x 8 x 10 sequences
    assert plan.synchronous_steps == 40
    assert plan.outer_steps == 16
    assert plan.parameters is not None
    assert plan.bytes_up_per_outer_step == 4 * plan.parameters.total
    assert plan.bytes_per_synchronous_step == 4 * plan.parameters.total
    assert json.loads(json.dumps(plan.to_json()))["parameters"]["total"] == plan.parameters.total


def test_epochs_need_the_corpus():
    """A budget in epochs is unknown before the corpus is read, and exact afterwards."""
    by_epochs = job(budget={"epochs": 1.5})
    unknown = make_plan(by_epochs, fleet("us"))
    assert (unknown.total_sequences, unknown.tokens, unknown.outer_steps) == (None, None, None)
    assert unknown.parameters is not None
    assert make_plan(by_epochs, fleet("us"), num_train_sequences=101).total_sequences == 152
    assert total_sequences(job(budget={"epochs": 1.1}), 10) == 11, "no rounding error becomes a sequence"


def test_presets_in_the_plan():
    """`synchronous` has no outer steps, `average` no synchronous ones."""
    synchronous = make_plan(job(outer={"preset": "synchronous"}), fleet("us", "eu"))
    assert (synchronous.outer_steps, synchronous.synchronous_steps) == (0, synchronous.inner_steps)
    average = make_plan(job(outer={"preset": "average"}), fleet("us", "eu"))
    assert average.synchronous_steps == 0


def test_other_models_and_tokenizers_stay_unknown(tmp_path):
    """Nothing is guessed: no vocabulary, no count."""
    python = make_plan(job(model={"kind": "python", "entry": "math:sqrt"}), fleet("us"))
    assert (python.parameters, python.flops, python.bytes_up_per_outer_step) == (None, None, None)
    tokens = {"kind": "tokenizers", "file": str(tmp_path / "tokenizer.json")}
    other = job(data={"seq_len": 32, "tokenizer": tokens})
    assert make_plan(other, fleet("us")).parameters is None
    assert make_plan(other, fleet("us"), vocab_size=1000).parameters is not None


def test_prices_add_up_or_stay_unknown():
    """A rate for the smallest and the largest fleet; unknown when one price is."""
    priced = fleet("us", "eu", workers=[1, 4], price_per_worker_hour=2.5)
    plan = make_plan(job(), priced)
    assert (plan.cost_per_hour_min, plan.cost_per_hour_max) == (5.0, 20.0)
    assert make_plan(job(), fleet("us")).cost_per_hour_max is None


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 40), st.integers(1, 7))
def test_the_deal_is_the_ledgers(total, block, islands):
    """What the plan promises each island is what the ledger leases to it."""
    names = [f"i{index}" for index in range(islands)]
    ledger = Ledger(total, block)
    held = []
    for name in names:
        while ledger.lease(name, 1, names):
            pass
        held.append(len(ledger.held(name, 1)))
    assert deal(total, block, islands) == held
    assert sum(held) == total
    assert not ledger.free
    assert ledger.committed == RangeSet()


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(1, 10_000), st.integers(1, 5))
def test_the_warm_up_is_never_longer_than_asked(share, total, islands):
    """Whole periods, at most the share, and all of it at a share of one."""
    small = job(outer={"preset": "diloco", "sync_every": 10, "warmup": share})
    warm = warmup_sequences(small, total, islands)
    assert 0 <= warm <= share * total
    assert warm % (10 * 8 * islands) == 0 or share == 1.0
    assert share < 1.0 or warm == total


def test_a_block_is_a_whole_number_of_batches():
    """A lease ends with a batch."""
    assert block_sequences(job()) == 32
