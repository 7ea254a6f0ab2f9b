"""Preemption is weather, failure is a bug, and nothing is tried for ever without progress."""

from __future__ import annotations

import pytest

from elastic.policy.recovery import Done, Ending, Record, Restart, Rules, Stop, decide, fingerprint_of

pytestmark = pytest.mark.unit

TRACE = """Traceback (most recent call last):
  File "/home/me/model.py", line 12, in forward
    return self.table[index]
IndexError: index 107 is out of bounds for tensor at 0x7f3a12
"""


def ending(kind, version=0, step=0, **fields):
    """An ending with defaults."""
    return Ending(kind=kind, version=version, step=step, **fields)


def run(*endings, rules=Rules()):  # noqa: B008
    """The decisions for a row of endings."""
    record, decisions = Record(), []
    for each in endings:
        record, decision = decide("us", record, each, rules)
        decisions.append(decision)
    return decisions


def test_an_island_that_finished_is_done():
    """Ending in order is not a failure."""
    assert run(ending("finished")) == [Done()]


def test_preemptions_never_use_up_the_budget():
    """Many preemptions under a budget of two failures: always started again."""
    decisions = run(*[ending("preempted") for _ in range(20)], rules=Rules(max_failures=2))
    assert all(isinstance(decision, Restart) for decision in decisions)


def test_preemptions_with_progress_between_them_do_not_slow_down():
    """Progress sets the pause back to the first one."""
    decisions = run(*[ending("preempted", step=100 * n) for n in range(1, 5)])
    assert [decision.delay_s for decision in decisions] == [1.0] * 4


def test_losses_without_progress_pause_longer_and_then_stop_resumable():
    """The pause doubles; beyond the budget the run stops with exit code 75 and the count."""
    decisions = run(*[ending("lost", what="node 10.0.0.7 died") for _ in range(4)])
    assert [decision.delay_s for decision in decisions[:3]] == [1.0, 2.0, 4.0]
    assert decisions[3] == Stop(
        75, "island us ended 4 times in a row without progress; the last time: node 10.0.0.7 died"
    )


def test_the_pause_is_bounded():
    """However often, an island is never away for longer than the limit because of us."""
    decisions = run(*[ending("preempted") for _ in range(50)])
    assert max(decision.delay_s for decision in decisions) == 60.0
    assert decisions[-1].reason == "island us was preempted"


def test_losses_with_progress_go_on_for_ever():
    """A long run may lose a node every hour."""
    decisions = run(*[ending("lost", version=n) for n in range(1, 40)])
    assert all(decision == Restart(1.0, "island us: lost") for decision in decisions)


def test_the_same_error_twice_without_progress_is_a_bug():
    """Exit code 1, with the user's traceback last; other numbers in the message are the same error."""
    again = TRACE.replace("107", "93").replace("0x7f3a12", "0x7f9911")
    first, second = run(ending("error", traceback=TRACE), ending("error", traceback=again))
    assert first == Restart(1.0, "island us: IndexError: index 107 is out of bounds for tensor at 0x7f3a12")
    assert isinstance(second, Stop)
    assert second.exit_code == 1
    assert second.reason.startswith("island us failed twice in the same way without progress: IndexError")
    assert second.reason.endswith(again)


def test_a_preemption_between_does_not_hide_a_bug():
    """The same error before and after a preemption, still without progress: exit code 1."""
    decisions = run(ending("error", traceback=TRACE), ending("preempted"), ending("error", traceback=TRACE))
    assert isinstance(decisions[-1], Stop)


def test_the_same_error_after_progress_is_tried_again():
    """An error that comes back later in the run is not yet a bug that stops it."""
    decisions = run(ending("error", traceback=TRACE, step=10), ending("error", traceback=TRACE, step=50))
    assert all(isinstance(decision, Restart) for decision in decisions)


def test_different_errors_without_progress_end_resumable():
    """Errors that differ share the budget of failures."""
    decisions = run(*[ending("error", traceback=TRACE + line) for line in "abcd"])
    assert decisions[-1].exit_code == 75


def test_going_back_is_not_progress():
    """After a restart from an older checkpoint the old best step still counts."""
    decisions = run(ending("error", traceback=TRACE, step=50), ending("error", traceback=TRACE, step=40))
    assert isinstance(decisions[-1], Stop)


@pytest.mark.parametrize("code", [2, 3])
def test_a_bad_configuration_is_never_retried(code):
    """What a restart cannot mend stops at once with its own exit code."""
    decisions = run(ending("error", what="no column 'body'", traceback=TRACE, exit_code=code))
    assert decisions == [Stop(code, "island us: no column 'body'")]


def test_storage_that_stays_away_ends_resumable_and_not_as_a_bug():
    """The same storage error every time is the world's fault: retried, then exit code 75."""
    decisions = run(*[ending("error", what="storage", traceback=TRACE, exit_code=75) for _ in range(4)])
    assert [type(decision) for decision in decisions] == [Restart, Restart, Restart, Stop]
    assert decisions[-1].exit_code == 75


def test_the_place_in_the_code_tells_errors_apart():
    """Another line of code is another fault; another process id is not."""
    assert fingerprint_of(TRACE) != fingerprint_of(TRACE.replace("line 12", "line 13"))
    assert fingerprint_of("RuntimeError: rank 1 (pid=123)") == fingerprint_of("RuntimeError: rank 0 (pid=9)")
