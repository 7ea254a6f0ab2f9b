"""What a run has cost, and whether it may go on: `budget.max_hours` and `budget.max_cost`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from elastic.base.errors import EXIT_RESUMABLE
from elastic.policy.recovery import Stop

if TYPE_CHECKING:
    from elastic.base.config import Budget


def accrue(worker_seconds: Mapping[str, float], prices: Mapping[str, float | None]) -> float:
    """Cost of the workers' time: seconds by island times the price of a worker hour.

    An island without a price costs nothing; a run with `max_cost` is refused unless all have one.
    """
    return sum(seconds / 3600.0 * (prices.get(island) or 0.0) for island, seconds in worker_seconds.items())


def over_budget(budget: Budget, hours: float, cost: float) -> Stop | None:
    """Stop, resumable, when the hours or the cost of all attempts together have reached a limit."""
    if budget.max_hours is not None and hours >= budget.max_hours:
        reason = f"budget.max_hours {budget.max_hours:g} is reached: the run has taken {hours:.2f} hours"
    elif budget.max_cost is not None and cost >= budget.max_cost:
        reason = f"budget.max_cost {budget.max_cost:g} is reached: the run has cost {cost:.2f}"
    else:
        return None
    return Stop(EXIT_RESUMABLE, f"{reason}; raise the limit and run the same command to go on")
