import time, itertools, pytest
from elastic.runtime.island_rank import IslandRank

pytestmark = pytest.mark.unit


def at_step(number, act):
    def tamper(rank):
        count = itertools.count(1)
        gradient = rank.inner.gradient

        def wrapped(batch):
            if next(count) == number:
                act(rank)
            return gradient(batch)

        rank.inner.gradient = wrapped

    return tamper


def until(cond, limit=20):
    t = time.monotonic()
    while not cond():
        if time.monotonic() - t > limit:
            raise TimeoutError
        time.sleep(0.002)


@pytest.fixture(scope="module")
def box():
    return {}


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("step", range(1, 25))
def test_stop(lab, box, step, hold):
    job = lab.job(sequences=192, outer={"warmup": 0.25, "codec_down": "bf16", "codec_up": "bf16"})
    if "whole" not in box:
        box["whole"] = lab.run(job, folder="whole").finished(192)
    whole = box["whole"]

    def stop(rank):
        rank.link.stop("test")

    def wait(rank):
        t = time.monotonic()
        while time.monotonic() - t < 0.5 and "us" not in rank.link.board.stopped:
            time.sleep(0.002)

    tamper = {"us": at_step(step, stop)}
    if hold:
        tamper["eu"] = at_step(step + 1, wait)
    first = lab.run(job, folder="cut", tamper=tamper)
    assert first.outcome.errors == {}, first.outcome.errors
    second = lab.run(job, folder="cut").finished(192)
    assert second.snapshot.counters["outer_steps"] == whole.snapshot.counters["outer_steps"]
    assert second.snapshot.counters["synchronous_steps"] == whole.snapshot.counters["synchronous_steps"]
    assert second.snapshot.digest == whole.snapshot.digest
