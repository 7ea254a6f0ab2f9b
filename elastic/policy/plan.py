"""What a run will do, before anything is started: steps, traffic, size and price.

Everything follows from the resolved job, the fleet and the number of training sequences. The same
rules are used while the run goes on (`total_sequences`, `block_sequences`, `warmup_sequences`), so that
the plan and the run cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, overload

from elastic.base.config import BytesTokenizer, DecoderModel, Fleet, Job
from elastic.base.known import known
from elastic.base.resolve import resolve_job
from elastic.policy.sizes import ParameterCount, bytes_per_outer_step, count_parameters, flops_per_token

BATCHES_PER_BLOCK = 4
BYTE_VOCABULARY = 257
"""256 bytes and the end of a document."""


@dataclass(frozen=True, kw_only=True)
class IslandPlan:
    """One island's share, if all islands stay from the first step to the last."""

    name: str
    region: str
    workers_min: int
    workers_max: int
    sequences: int | None
    inner_steps: int | None
    price_per_hour_min: float | None
    price_per_hour_max: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do. None: not known before the corpus is read, the model built, or a price set.

    Bytes are payload in one direction between one island and the synchronizer.
    """

    job: str
    fleet: str
    islands: tuple[IslandPlan, ...]
    tokens: int | None
    total_sequences: int | None
    seq_len: int
    epochs: float | None
    block_sequences: int
    """Sequences leased at once: a whole number of batches, fixed when the run starts."""
    sync_every: int
    inner_steps: int | None
    """Of the island with the most."""
    synchronous_steps: int | None
    """Of these, in the synchronous phase."""
    outer_steps: int | None
    """Outer steps after the synchronous phase."""
    parameters: ParameterCount | None
    flops: int | None
    """Of the whole run."""
    bytes_up_per_outer_step: int | None
    bytes_down_per_outer_step: int | None
    bytes_per_synchronous_step: int | None
    """Gradients travel in fp32, up and down alike."""
    cost_per_hour_min: float | None
    cost_per_hour_max: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain types with the names of the fields, for `elastic plan --json`."""
        return asdict(self)


def make_plan(
    job: Job, fleet: Fleet, num_train_sequences: int | None = None, vocab_size: int | None = None
) -> Plan:
    """Plan a run. `num_train_sequences`: sequences of the corpus; `vocab_size`: of its tokenizer.

    Both may be left out before the data is prepared; then a budget in epochs, or the size of a model
    with another tokenizer than bytes, stays unknown.
    """
    job = resolve_job(job).value
    batch, block = job.inner.batch_sequences, block_sequences(job)
    total = total_sequences(job, num_train_sequences)
    shares = deal(total, block, len(fleet.islands)) if total else [None] * len(fleet.islands)
    islands = tuple(
        IslandPlan(
            name=island.name,
            region=island.region,
            workers_min=island.workers.min,
            workers_max=island.workers.max,
            sequences=share,
            inner_steps=None if share is None else -(-share // batch),
            price_per_hour_min=_price(island.price_per_worker_hour, island.workers.min),
            price_per_hour_max=_price(island.price_per_worker_hour, island.workers.max),
        )
        for island, share in zip(fleet.islands, _by_name(fleet, shares), strict=True)
    )
    sync_every = known(job.outer.sync_every)
    steps = max(island.inner_steps or 0 for island in islands) if total else None
    synchronous = None
    if total and steps:
        synchronous = min(-(-warmup_sequences(job, total, len(islands)) // (batch * len(islands))), steps)
    count = _count(job, vocab_size)
    tokens = total * job.data.seq_len if total else None
    return Plan(
        job=job.name,
        fleet=fleet.name,
        islands=islands,
        tokens=tokens,
        total_sequences=total,
        seq_len=job.data.seq_len,
        epochs=total / num_train_sequences if total and num_train_sequences else None,
        block_sequences=block,
        sync_every=sync_every,
        inner_steps=steps,
        synchronous_steps=synchronous,
        outer_steps=None if steps is None else -(-(steps - (synchronous or 0)) // sync_every),
        parameters=count,
        flops=_flops(job, vocab_size, tokens),
        bytes_up_per_outer_step=bytes_per_outer_step(count, known(job.outer.codec_up)) if count else None,
        bytes_down_per_outer_step=bytes_per_outer_step(count, known(job.outer.codec_down)) if count else None,
        bytes_per_synchronous_step=bytes_per_outer_step(count, "fp32") if count else None,
        cost_per_hour_min=_sum(island.price_per_hour_min for island in islands),
        cost_per_hour_max=_sum(island.price_per_hour_max for island in islands),
    )


@overload
def total_sequences(job: Job, num_train_sequences: int) -> int: ...
@overload
def total_sequences(job: Job, num_train_sequences: None) -> int | None: ...
def total_sequences(job: Job, num_train_sequences: int | None) -> int | None:
    """Positions of the budget: tokens over tokens a sequence, or epochs times sequences, rounded up.

    None if the budget is in epochs and the number of sequences is not known.
    """
    if job.budget.tokens is not None:
        return -(-job.budget.tokens // job.data.seq_len)
    if num_train_sequences is None or job.budget.epochs is None:
        return None
    return math.ceil(round(job.budget.epochs * num_train_sequences, 6))


def block_sequences(job: Job) -> int:
    """Sequences leased at once: four batches.

    A whole number of batches, so that a lease ends with a batch; few, so that little goes back to
    the queue when an island is lost. Fixed in the first record of a run.
    """
    return BATCHES_PER_BLOCK * job.inner.batch_sequences


def warmup_sequences(job: Job, total: int, islands: int) -> int:
    """Positions that the synchronous phase trains on, for a resolved job and all islands together.

    `outer.warmup` of the budget in whole periods of `sync_every` steps, and never more than was
    asked for; a share of 1 is the whole run.
    """
    share = known(job.outer.warmup)
    if share >= 1.0:
        return total
    period = known(job.outer.sync_every) * job.inner.batch_sequences * islands
    return int(share * total) // period * period


def deal(total: int, block: int, islands: int) -> list[int]:
    """Sequences of each island, in the order of sorted names: block k goes to island k mod M."""
    blocks = -(-total // block)
    counts = [(blocks - index + islands - 1) // islands * block for index in range(islands)]
    counts[(blocks - 1) % islands] -= blocks * block - total  # the last block is short
    return counts


def _by_name(fleet: Fleet, shares: list[Any]) -> list[Any]:
    """The shares, dealt to sorted names, in the order of the fleet."""
    order = sorted(island.name for island in fleet.islands)
    return [shares[order.index(island.name)] for island in fleet.islands]


def _count(job: Job, vocab_size: int | None) -> ParameterCount | None:
    size = vocab_size or _byte_vocabulary(job)
    return count_parameters(job.model, size) if size and isinstance(job.model, DecoderModel) else None


def _flops(job: Job, vocab_size: int | None, tokens: int | None) -> int | None:
    size = vocab_size or _byte_vocabulary(job)
    if not size or tokens is None or not isinstance(job.model, DecoderModel):
        return None
    return flops_per_token(job.model, size, job.data.seq_len) * tokens


def _byte_vocabulary(job: Job) -> int | None:
    return BYTE_VOCABULARY if isinstance(job.data.tokenizer, BytesTokenizer) else None


def _price(per_worker: float | None, workers: int) -> float | None:
    return None if per_worker is None else per_worker * workers


def _sum(prices: Iterable[float | None]) -> float | None:
    known = list(prices)
    return None if None in known else sum(price or 0.0 for price in known)
