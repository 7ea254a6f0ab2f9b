"""Values for `outer.lr`, `outer.momentum` and `outer.sync_every` when they say `auto`, with reasons.

Sources: DiLoCo's scaling laws (arXiv 2503.09799) give the best constant outer learning rate by number of
islands M, at momentum 0.9 and H 30, whatever the size of the model. At shorter H the deltas of successive
outer steps are correlated, and momentum 0.9 over-drives: our own runs (docs/explanation/learning.md,
H 20, two islands) did best at 0.7 / 0.8. H itself follows from what the link can carry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.base.outer_config import PresetName
from elastic.base.presets import PRESETS

PAPER_MOMENTUM = 0.9
PAPER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
"""By number of islands; 2503.09799, momentum 0.9, H 30."""
PAPER_H = 30
SHORT_MOMENTUM, SHORT_LR = 0.8, 0.7
"""Below that H; measured with two islands at H 20."""
SHORT_ISLANDS = 2
LONGEST_PUBLISHED_H = 500
"""arXiv 2311.08105, the first DiLoCo paper."""

_PAPER = f"arXiv 2503.09799 (momentum {PAPER_MOMENTUM:g}, H {PAPER_H})"
_MEASURED = "docs/explanation/learning.md"


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """What is known of the slowest link between an island and the synchronizer, and of what it carries."""

    bytes_per_outer_step: int
    """All that crosses the link in a period, one after the other: delta up, and version down."""
    mbit_per_s: float
    step_s: float
    """One inner step."""
    utilisation: float = 0.95
    """Share of the time that islands should compute."""
    fragments: int = 1
    overlap_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen values; each `why` is one line with the numbers and their source."""

    sync_every: int
    sync_every_why: str
    lr: float
    lr_why: str
    momentum: float
    momentum_why: str


def choose_outer(
    islands: int, sync_every: int | None, preset: PresetName, link: LinkFacts | None = None
) -> Choice:
    """Choose for this many islands; `sync_every` None: that, too, from the preset and the link.

    Short periods (below H 30) get 0.7 / 0.8, scaled from two islands to M as in the paper's table; others
    the table itself. The best rate rises further with H, by how much is not published: it is not
    extrapolated. A preset without outer momentum is plain averaging and stays what it is. Raises
    ValueError for no island, or a `sync_every` below 1.
    """
    if islands < 1 or (sync_every is not None and sync_every < 1):
        raise ValueError(f"need islands and sync_every of at least 1, got {islands} and {sync_every}")
    period, period_why = (sync_every, "as given") if sync_every else _period(preset, link)
    values = PRESETS[preset]
    if values.momentum == 0.0:
        lr, momentum = values.lr, values.momentum
        lr_why = momentum_why = f"preset {preset}: {values.source}, no outer optimiser to tune"
    elif period < PAPER_H:
        lr, momentum = lr_for_islands(SHORT_LR, SHORT_ISLANDS, islands), SHORT_MOMENTUM
        lr_why = (
            f"H {period} is below {PAPER_H}: {SHORT_LR:g} measured with {SHORT_ISLANDS} islands at H 20 "
            f"({_MEASURED}), times {lr:g}/{SHORT_LR:g} for {islands} as in {_PAPER}"
        )
        momentum_why = (
            f"H {period} is below {PAPER_H}: deltas are correlated and {PAPER_MOMENTUM:g} over-drives "
            f"(+2.5 % loss at H 20 against {SHORT_MOMENTUM:g}, {_MEASURED})"
        )
    else:
        lr, momentum = table_lr(islands), PAPER_MOMENTUM
        table = ", ".join(f"{m}: {rate:g}" for m, rate in PAPER_LR.items())
        lr_why = f"{islands} islands, H {period}: {_PAPER} by islands: {table}"
        momentum_why = f"H {period} is at least {PAPER_H}: {_PAPER}"
    return Choice(
        sync_every=period,
        sync_every_why=period_why,
        lr=lr,
        lr_why=lr_why,
        momentum=momentum,
        momentum_why=momentum_why,
    )


def choose_sync_every(
    bytes_per_outer_step: int,
    link_mbit_per_s: float,
    step_s: float,
    utilisation: float,
    fragments: int = 1,
    overlap_steps: int = 0,
) -> tuple[int, str]:
    """The shortest period H that leaves the islands computing for `utilisation` of the time, and why.

    A period's transfers take x = bits / (W * step) inner steps. At utilisation u a period lasts H/u steps,
    and (a) the link has to carry it all in that time, `H >= u*x` (the conservation bound
    `W >= N*bits / (H*step)`, relaxed by u); (b) what overlap does not hide, x less `overlap_steps` for
    each fragment, is waiting: `H >= (x - P*overlap) * u/(1-u)`. Never less than the fragments or the
    overlap need. Latency, and what the backward pass could hide, are not counted.

    Raises ValueError unless the link and the step are positive and 0 < utilisation < 1.
    """
    if link_mbit_per_s <= 0 or step_s <= 0 or bytes_per_outer_step < 0:
        raise ValueError("bandwidth and step time must be positive, and bytes not negative")
    if not 0 < utilisation < 1:
        raise ValueError(f"utilisation {utilisation}: must lie between 0 and 1")
    transfer = bytes_per_outer_step * 8 / (link_mbit_per_s * 1e6 * step_s)
    carried = utilisation * transfer
    waiting = max(0.0, transfer - fragments * overlap_steps) * utilisation / (1 - utilisation)
    least = max(fragments, overlap_steps, 1)
    # rounded first: a bound that is a whole number up to rounding errors is that number
    period = max(least, math.ceil(round(max(carried, waiting), 6)))
    if period == least:
        rule = f"the least for {fragments} fragments and overlap {overlap_steps}"
    elif waiting >= carried:
        rule = (
            f"waiting at most {1 - utilisation:.3g} of the time, overlap {overlap_steps} x {fragments} hidden"
        )
    else:
        rule = "conservation bound W >= N*bits/(H*step)"
    why = (
        f"{bytes_per_outer_step} bytes at {link_mbit_per_s:g} Mbit/s last {transfer:.4g} steps of "
        f"{step_s:g} s; utilisation {utilisation:g} needs H >= {period}: {rule}"
    )
    if period > LONGEST_PUBLISHED_H:
        why += f"; longer than any published H ({LONGEST_PUBLISHED_H}, arXiv 2311.08105)"
    return period, why


def table_lr(islands: int) -> float:
    """The paper's outer learning rate, linear in log2 M between its columns, constant beyond them."""
    islands = min(max(islands, min(PAPER_LR)), max(PAPER_LR))
    below = max(m for m in PAPER_LR if m <= islands)
    above = min(m for m in PAPER_LR if m >= islands)
    if below == above:
        return PAPER_LR[below]
    share = math.log2(islands / below) / math.log2(above / below)
    # four digits: log2 may differ in its last bit between machines
    return round(PAPER_LR[below] + share * (PAPER_LR[above] - PAPER_LR[below]), 4)


def lr_for_islands(lr: float, islands_before: int, islands_now: int) -> float:
    """The outer learning rate after the number of islands changed in mid-run; momentum stays.

    Scaled by the ratio of the paper's rates for both numbers (`table_lr`), so a run that changes ends at
    the rate of one that began so. More islands average more noise away and bear a larger step. Meant for
    islands that joined or left; while one is late, `partial: share` scales that step alone.
    """
    return lr * (table_lr(islands_now) / table_lr(islands_before))


def _period(preset: PresetName, link: LinkFacts | None) -> tuple[int, str]:
    """The preset's H, longer if the link needs it; shorter ones are not measured with its lr."""
    usual = PRESETS[preset].sync_every
    if link is None or preset == "synchronous":
        return usual, f"preset {preset}: {PRESETS[preset].source}" + ("" if link else "; link not measured")
    needed, why = choose_sync_every(
        link.bytes_per_outer_step,
        link.mbit_per_s,
        link.step_s,
        link.utilisation,
        link.fragments,
        link.overlap_steps,
    )
    if needed > usual:
        return needed, why
    return usual, f"preset {preset}: {usual} is enough for the link ({why})"
