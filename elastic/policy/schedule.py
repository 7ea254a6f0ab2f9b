"""The learning rate as a function of progress, and progress itself.

Progress is the share of the token budget that is done, the same number on every island: committed
tokens of the adopted version, plus own steps since then at the pace planned for all islands. It has
no state, so a resume, a resize or a join changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.base.config import Inner


def progress(
    committed_tokens: int, own_steps_since: int, planned_tokens_per_step: int, total_tokens: int
) -> float:
    """Share of the budget, 0 to 1, after `own_steps_since` steps on the adopted version.

    `committed_tokens` and `planned_tokens_per_step` (of all live islands together) come with the
    adopted version. For the rate of the step about to be taken, count that step too: then the first
    step has a rate above zero and the last one has progress 1.
    """
    return min(1.0, (committed_tokens + own_steps_since * planned_tokens_per_step) / total_tokens)


def lr_at(progress: float, inner: Inner) -> float:
    """Linear rise to `inner.lr` over `warmup_share`, then a cosine down to `final_lr_share` of it.

    Continuous and without a jump anywhere in 0 .. 1; progress outside is clamped.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < inner.warmup_share:
        return inner.lr * progress / inner.warmup_share
    rest = 1.0 - inner.warmup_share
    done = (progress - inner.warmup_share) / rest if rest > 0.0 else 0.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * done))
    return inner.lr * (inner.final_lr_share + (1.0 - inner.final_lr_share) * cosine)
