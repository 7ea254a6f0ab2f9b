"""Stop signals become a wish, with the exit code that shells expect."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from elastic.runtime.signals import Interrupted, StopSignals

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Give pytest its handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_remembered(number: signal.Signals, code: int) -> None:
    """Nothing is interrupted; the controller reads which signal it was, and ends with its code."""
    signals = StopSignals()
    signals.check()
    assert (signals.received, signals.exit_code) == (None, 0)
    signals.install()
    os.kill(os.getpid(), number)
    assert signals.received == number
    assert signals.exit_code == code
    with pytest.raises(Interrupted, match=number.name):
        signals.check()


def test_the_second_signal_ends_at_once() -> None:
    """Whoever presses ctrl-C twice means it."""
    signals = StopSignals()
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.exit_code == 143  # the first one counts
