"""Time of workers becomes money, and limits stop a run so that it can go on."""

from __future__ import annotations

import pytest

from elastic.base.config import Budget
from elastic.policy.cost import accrue, over_budget
from elastic.policy.recovery import Stop

pytestmark = pytest.mark.unit


def test_cost_is_hours_times_price():
    """Half an hour of two workers at 3 an hour, and an island without a price."""
    assert accrue({"us": 3600.0, "eu": 7200.0}, {"us": 3.0, "eu": None}) == pytest.approx(3.0)
    assert accrue({"us": 1800.0}, {}) == 0.0


def test_a_run_within_its_limits_goes_on():
    """No limit, or none reached: no decision."""
    assert over_budget(Budget(tokens=1), hours=1e6, cost=1e6) is None
    assert over_budget(Budget(tokens=1, max_hours=2.0, max_cost=10.0), hours=1.99, cost=9.99) is None


def test_a_limit_that_is_reached_stops_resumable():
    """The reason names the limit and the figure."""
    stop = over_budget(Budget(tokens=1, max_hours=2.0), hours=2.0, cost=0.0)
    assert stop == Stop(
        75,
        "budget.max_hours 2 is reached: the run has taken 2.00 hours; "
        "raise the limit and run the same command to go on",
    )
    stop = over_budget(Budget(tokens=1, max_cost=10.0), hours=0.0, cost=10.004)
    assert stop is not None
    assert stop.reason.startswith("budget.max_cost 10 is reached: the run has cost 10.00;")
