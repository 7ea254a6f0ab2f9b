"""Islands that fail, hand in nonsense, come late or come back: the others go on, the ledger stays exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic.runtime.island_rank import IslandRank
from elastic.training.digest import digest

pytestmark = pytest.mark.unit


def _fail(rank: IslandRank) -> None:
    raise OSError(f"the node of {rank.name} went away")


def _times_trained(run: Any, total: int) -> Counter[int]:
    """How often each position went through an inner step, over all islands of this life."""
    times = Counter({position: 0 for position in range(total)})
    for batches in run.trained.values():
        for start, stop in batches:
            times.update(range(start, stop))
    return times


# ------------------------------------------------------------------------------------ killed


@pytest.mark.parametrize("warmup", [0.0, 0.5])
def test_a_failed_island_does_not_hold_up_the_others(lab: Any, warmup: float) -> None:
    """An island raises in mid-period: the other trains what it held, and all is committed once."""
    job = lab.job(sequences=96, outer={"warmup": warmup})
    run = lab.run(job, tamper={"us": lab.before_step(5, _fail)}).finished(96, errors=("us",))
    (lost,) = run.events("island_lost")
    assert lost["island"] == "us"
    assert "the node of us went away" in lost["reason"]
    assert lost["returned_sequences"] > 0
    assert run.outcome.endings == {"eu": "done"}


def test_a_killed_run_continues_with_the_same_total(lab: Any) -> None:
    """All threads die between two checkpoints; the next life redoes at most the work since the last commit.

    Nothing is committed twice, and what was trained twice is what had not been merged.
    """
    job = lab.job(sequences=144)
    tamper = {"eu": lab.before_step(8, _fail), "us": lab.before_step(9, _fail)}
    killed = lab.run(job, tamper=tamper)
    assert sorted(killed.outcome.errors) == ["eu", "us"]
    before = killed.snapshot.committed_sequences
    assert 0 < before < 144
    run = lab.run(job).finished(144)
    again = _times_trained(killed, 144) + _times_trained(run, 144)
    assert set(again) == set(range(144))
    trained_twice = sum(times - 1 for times in again.values())
    assert trained_twice == sum(stop - start for b in killed.trained.values() for start, stop in b) - before
    assert (
        run.snapshot.counters["replayed_sequences"] == 0
    )  # none of them was in the model when it was redone
    assert run.records[-1].epoch == 2


def test_a_killed_warm_up_continues_from_its_last_anchor(lab: Any) -> None:
    """Steps after the last anchor are redone, from the parameters and moments of that anchor.

    With one island, the result is that of an undisturbed run, bit for bit.
    """
    job = lab.job(sequences=96, preset="synchronous", outer={"sync_every": 4})
    whole = lab.run(job, ("eu",), folder="whole").finished(96)
    killed = lab.run(job, ("eu",), folder="cut", tamper={"eu": lab.before_step(11, _fail)})
    assert killed.snapshot.version == 2
    cut = lab.run(job, ("eu",), folder="cut").finished(96)
    assert cut.digests == whole.digests
    assert digest(cut.state.moments) == digest(whole.state.moments)


def test_an_island_that_comes_back_takes_up_its_checkpoint(lab: Any) -> None:
    """A restarted island goes on in the same attempt, as a new generation, and the run ends in order."""
    job = lab.job(sequences=144, checkpoint={"island_every": 1})
    run = lab.run(job, tamper={"us": _once(lab.before_step(8, _fail))}, restarts=1)
    run.finished(144, errors=("us",))
    joined = [event for event in run.events("island_joined") if event["island"] == "us"]
    assert [(event["generation"], event["resumed_step"]) for event in joined[:2]] == [(1, 0), (2, 6)]
    ids = [entry["id"] for record in run.steps for entry in record.body["contributions"]]
    assert len(ids) == len(set(ids))


def _once(tamper: Callable[[IslandRank], None]) -> Callable[[IslandRank], None]:
    """Trouble for the first incarnation only."""
    done: list[str] = []

    def first(rank: IslandRank) -> None:
        if not done:
            tamper(rank)
        done.append(rank.name)

    return first


@pytest.mark.parametrize("step", [2, 6])
def test_an_island_that_rejoins_the_warm_up_receives_the_moments(lab: Any, step: int) -> None:
    """Before and after the first anchor: who rejoins leaves the warm-up with the others' moments."""
    saved: dict[str, tuple[int, str, str, str]] = {}

    def watch(rank: IslandRank) -> None:
        store: Any = rank.store
        save = store.save

        def call(what: Any, generation: int) -> str:
            first, second = ({n: pair[i] for n, pair in what.moments.items()} for i in (0, 1))
            saved.setdefault(rank.name, (what.adam_steps, *map(digest, (what.parameters, first, second))))
            return save(what, generation)

        store.save = call

    fail_once = _once(lab.before_step(step, _fail))

    def us(rank: IslandRank) -> None:
        watch(rank)
        fail_once(rank)

    job = lab.job(sequences=160, outer={"warmup": 0.5})
    run = lab.run(job, tamper={"eu": watch, "us": us}, restarts=1).finished(160, errors=("us",))
    assert len(run.events("island_lost")) == 1
    (changed,) = run.events("phase_changed")
    assert changed["islands"] == ["eu", "us"]
    assert saved["eu"] == saved["us"]
    assert saved["eu"][:2] == (run.snapshot.counters["synchronous_steps"], changed["digest"])


def test_when_all_are_lost_in_the_first_stretch_it_is_redone_from_nothing(lab: Any) -> None:
    """Islands that were given up before the first anchor start again with zero moments.

    They are the same processes with their old moments in memory; the redone run is bit-identical to
    one that nothing happened to.
    """
    job = lab.job(sequences=48, preset="synchronous")
    whole = lab.run(job, ("eu",), folder="whole").finished(48)

    def give_up(rank: IslandRank) -> None:
        rank.link.declare_lost("eu", "a test says so")  # type: ignore[attr-defined]

    cut = lab.run(job, ("eu",), folder="cut", tamper={"eu": lab.before_step(3, give_up)}).finished(48)
    assert [e["generation"] for e in cut.events("island_joined")] == [1, 2]
    assert cut.digests == whole.digests
    assert any("2 steps are redone" in event["what"] for event in cut.events("warning"))


# ---------------------------------------------------------------------------------- refused


def test_a_delta_that_is_not_finite_is_refused_by_name(lab: Any) -> None:
    """NaN in the second island's delta: the round closes without it, it re-bases, the run goes on.

    The step of that round shrinks to the share of the tokens that were merged, and exactly the
    refused ranges are trained once more.
    """

    def poison(rank: IslandRank) -> None:
        next(iter(rank.local().values()))[0, 0] = torch.nan

    run = lab.run(lab.job(sequences=144), tamper={"us": lab.after_step(6, poison)}).finished(144)
    (refused,) = run.events("refused")
    assert (refused["island"], refused["id"]) == ("us", "us/1/0/1")
    assert "not finite" in refused["reason"]
    body = next(record.body for record in run.steps if record.body["version"] == 2)
    assert [(entry["island"], entry["weight"]) for entry in body["contributions"]] == [("eu", 1.0)]
    assert body["scale"] == 0.5
    entered = [e for e in run.events("island_joined") if e["island"] == "us"]
    assert entered[1]["digest"] == run.digests[2]
    assert all(bool(value.isfinite().all()) for value in run.state.states[0].theta.values())
    lost = {position for start, stop in run.trained["us"][3:6] for position in range(start, stop)}
    assert _times_trained(run, 144) == {p: 2 if p in lost else 1 for p in range(144)}


def test_a_gradient_that_is_not_finite_is_refused_by_name(lab: Any) -> None:
    """In the synchronous phase the step goes on without the poisoned gradient, and its batch is redone."""

    def poison(rank: IslandRank) -> None:
        gradient = rank.inner.gradient

        def call(batch: Any) -> Any:
            loss = gradient(batch)
            if rank.step == 4 and not rank.refusals:
                next(iter(rank.inner.gradients().values()))[0, 0] = torch.inf
            return loss

        rank.inner.gradient = call  # type: ignore[method-assign]

    run = lab.run(lab.job(sequences=96, preset="synchronous"), tamper={"us": poison}).finished(96)
    (refused,) = run.events("refused")
    assert refused["island"] == "us"
    assert "not finite" in refused["reason"]
    assert run.outcome.endings == {"eu": "done", "us": "done"}
    assert all(bool(value.isfinite().all()) for value in run.state.states[0].theta.values())


def _poisoned(rank: IslandRank) -> None:
    """Every delta of the island holds a NaN."""
    step = rank.inner.step

    def call(lr: float) -> None:
        step(lr)
        next(iter(rank.local().values()))[0, 0] = torch.nan if rank.phase.steps_since == 2 else 0.0

    rank.inner.step = call  # type: ignore[method-assign]


def test_an_island_that_is_refused_again_and_again_is_quarantined(lab: Any) -> None:
    """Three poisoned deltas in a row: it takes part no longer, is named, and the run finishes without it."""
    run = lab.run(lab.job(sequences=144), tamper={"us": _poisoned}).finished(144)
    assert len(run.events("refused")) == 3
    (event,) = run.events("quarantined")
    assert (event["island"], event["reason"]) == ("us", "its values are not finite")
    assert run.outcome.endings == {"eu": "done", "us": "done"}
    assert all(bool(value.isfinite().all()) for value in run.state.theta.values())


def test_a_delta_of_absurd_length_is_refused_by_name(lab: Any) -> None:
    """A delta a million times too long is finite, and still not merged; the island re-bases and goes on."""

    def explode(rank: IslandRank) -> None:
        if rank.step == 17 and not rank.refusals:  # the last step of the sixth period
            next(iter(rank.local().values())).mul_(1e6)

    run = lab.run(lab.job(sequences=192), tamper={"us": lab.after_step(18, explode)}).finished(192)
    (refused,) = run.events("refused")
    assert refused["island"] == "us"
    assert "times the usual" in refused["reason"]
    assert max(float(value.abs().max()) for value in run.state.theta.values()) < 100.0


def test_a_run_whose_every_island_is_quarantined_fails(lab: Any) -> None:
    """Nothing could ever be merged again: the run ends and says why."""
    run = lab.run(lab.job(sequences=144), ("us",), tamper={"us": _poisoned})
    assert "every island is quarantined" in run.snapshot.failure
    assert "not finite" in run.snapshot.failure


# ----------------------------------------------------------------------------------- coming


def test_a_late_island_starts_from_the_newest_version(lab: Any) -> None:
    """The run begins with one island; the second is let in at a version and holds exactly that."""

    def begin(rank: IslandRank) -> None:
        rank.link.begin()  # type: ignore[attr-defined]

    def wait(rank: IslandRank) -> None:
        lab.until(lambda: rank.link.snapshot().version >= 2)  # type: ignore[attr-defined]

    def hold(rank: IslandRank) -> None:
        # The rest of the run takes milliseconds: wait for the other one.
        lab.until(lambda: "us" in rank.link.board.joined)  # type: ignore[attr-defined]

    def eu(rank: IslandRank) -> None:
        begin(rank)
        lab.before_step(10, hold)(rank)

    run = lab.run(lab.job(sequences=192), tamper={"eu": eu, "us": wait}).finished(192)
    joined = next(event for event in run.events("island_joined") if event["island"] == "us")
    assert joined["version"] >= 2
    assert joined["digest"] == run.digests[joined["version"]]
    both = [record.body for record in run.steps if len(record.body["contributions"]) == 2]
    assert both
    assert min(body["version"] for body in both) == joined["version"] + 1


def test_a_late_island_enters_the_warm_up_at_an_anchor(lab: Any) -> None:
    """A joiner in the synchronous phase makes the stretch end early, and starts from its anchor."""

    def begin(rank: IslandRank) -> None:
        rank.link.begin()  # type: ignore[attr-defined]
        hold: Any = lambda rank: lab.until(lambda: "us" in rank.link.board.joined)  # noqa: E731
        lab.before_step(6, hold)(rank)

    def wait(rank: IslandRank) -> None:
        lab.until(lambda: rank.link.board.gradient_step >= 4)  # type: ignore[attr-defined]

    job = lab.job(sequences=96, preset="synchronous", outer={"sync_every": 100})
    run = lab.run(job, tamper={"eu": begin, "us": wait}).finished(96)
    joined = next(event for event in run.events("island_joined") if event["island"] == "us")
    assert joined["version"] == 1
    assert run.steps[0].body["contributions"][0]["steps"] < 12
    assert joined["digest"] == run.digests[1]
    assert [entry["island"] for entry in run.steps[-1].body["contributions"]] == ["eu", "us"]
    assert not run.events("island_lost")
