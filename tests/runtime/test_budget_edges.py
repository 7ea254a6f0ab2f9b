"""Budgets at their edges: tiny, uneven, over epochs, finished, enlarged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.base.config import Data
from elastic.runtime.island_rank import IslandRank
from elastic.training.corpus import Corpus, prepare
from elastic.training.order import Order

pytestmark = pytest.mark.unit

SEQUENCES = 24
"""Of the corpus that a run can go through several times within seconds."""


def _positions(run: Any) -> Counter[int]:
    """How often each position of the budget went through a step."""
    return Counter(p for batches in run.trained.values() for a, b in batches for p in range(a, b))


@pytest.mark.parametrize(
    ("sequences", "islands"),
    [(1, 1), (1, 3), (3, 2), (5, 1), (17, 2), (33, 3), (50, 3)],
)
@pytest.mark.parametrize("preset", ["diloco", "synchronous"])
def test_any_budget_is_committed_exactly_once(lab: Any, sequences: int, islands: int, preset: str) -> None:
    """Less than a block, no multiple of a batch, fewer blocks than islands: it ends, with everything."""
    names = ("a", "b", "c")[:islands]
    run = lab.run(lab.job(sequences=sequences, preset=preset), names).finished(sequences)
    trained = Counter(
        p for batches in run.trained.values() for start, stop in batches for p in range(start, stop)
    )
    assert trained == Counter(range(sequences))
    assert set(run.outcome.endings.values()) == {"done"}
    assert run.snapshot.counters["committed_tokens"] == sequences * 16


def test_a_warm_up_that_does_not_fit_is_left_out(lab: Any) -> None:
    """A warm-up share of less than one period for all islands means no synchronous step at all."""
    run = lab.run(lab.job(sequences=40, outer={"warmup": 0.5})).finished(40)
    assert run.snapshot.counters["synchronous_steps"] == 0


def test_a_warm_up_of_the_whole_budget_never_leaves_it(lab: Any) -> None:
    """With `warmup: 1` every step is synchronous, and the last anchor is the result."""
    run = lab.run(lab.job(sequences=40, outer={"warmup": 1.0})).finished(40)
    assert run.snapshot.counters["outer_steps"] == 0
    assert not run.events("phase_changed")


# ------------------------------------------------------------------------------------ epochs


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of exactly SEQUENCES training sequences of 16 tokens."""
    folder = tmp_path_factory.mktemp("few")
    text = "".join(chr(97 + (7 * i + i // 5) % 26) for i in range(16 * SEQUENCES))
    (folder / "train.txt").write_text(text)
    (folder / "held-out.txt").write_text(text[::-1][:80])
    data = Data(
        sources=[str(folder / "train.txt")], validation_sources=[str(folder / "held-out.txt")], seq_len=16
    )
    info = prepare(data, folder / "data")
    assert info.train.sequences == SEQUENCES
    return Corpus.open(folder / "data" / info.key)


@pytest.fixture
def lab_of_few(few: Corpus, lab: Any, tmp_path: Path) -> Any:
    """A lab over the few sequences."""
    return type(lab)(few, lab.sources, tmp_path)


def _job_of_epochs(lab: Any, epochs: float) -> Any:
    job = lab.job(sequences=1)
    return job.model_copy(update={"budget": job.budget.model_copy(update={"tokens": None, "epochs": epochs})})


def _reads(run: Any, seed: int = 0) -> Counter[int]:
    """How often each sequence of the corpus went through a step."""
    order = Order(SEQUENCES, seed)
    batches = [batch for each in run.trained.values() for batch in each]
    return Counter(int(i) for start, stop in batches for i in order.sequences(start, stop))


def test_every_epoch_reads_every_sequence_once(lab_of_few: Any) -> None:
    """Three epochs read every sequence three times, in three different orders, across their borders."""
    run = lab_of_few.run(_job_of_epochs(lab_of_few, 3)).finished(3 * SEQUENCES)
    assert _reads(run) == Counter({i: 3 for i in range(SEQUENCES)})
    order = Order(SEQUENCES, 0)
    epochs = [tuple(order.sequences(e * SEQUENCES, (e + 1) * SEQUENCES)) for e in range(3)]
    assert len(set(epochs)) == 3


@pytest.mark.parametrize("after", [SEQUENCES - 4, SEQUENCES, SEQUENCES + 4, 0])
def test_a_resume_at_the_end_of_an_epoch_skips_nothing(lab_of_few: Any, after: int) -> None:
    """Stopped exactly at, one batch before, and one after the end of an epoch, and before any step.

    Both lives together read every sequence twice in two epochs.
    """

    def ask(rank: IslandRank) -> None:
        rank.link.stop("test")  # type: ignore[attr-defined]
        lab_of_few.until(lambda: rank.heart.stop_asked)

    # One island takes 4 sequences a step: `after` positions are trained, the next look finds the wish.
    trouble: Callable[[IslandRank], None] = lab_of_few.after_step(after // 4, ask) if after else ask_first
    first = lab_of_few.run(_job_of_epochs(lab_of_few, 2), ("eu",), tamper={"eu": trouble})
    assert first.outcome.endings == {"eu": "stopped"}
    assert sum(_reads(first).values()) == after
    second = lab_of_few.run(_job_of_epochs(lab_of_few, 2), ("eu",)).finished(2 * SEQUENCES)
    assert _reads(first) + _reads(second) == Counter({i: 2 for i in range(SEQUENCES)})


def ask_first(rank: IslandRank) -> None:
    """Ask for the stop before the island has done anything."""
    rank.link.stop("test")  # type: ignore[attr-defined]


# -------------------------------------------------------------------------- finished and more


def test_a_finished_run_that_is_started_again_changes_nothing(lab: Any) -> None:
    """Nothing is trained, judged or written but the note that it was resumed."""
    job = lab.job(sequences=48)
    once = lab.run(job).finished(48)
    kinds = [record.kind for record in once.records]
    files = {path: path.read_bytes() for path in Path(once.storage.url).rglob("outer/*")}
    again = lab.run(job).finished(48)
    assert [record.kind for record in again.records] == [*kinds, "resume"]
    assert {path: path.read_bytes() for path in Path(again.storage.url).rglob("outer/*")} == files
    assert again.trained == {"eu": [], "us": []}
    assert again.digests == once.digests
    assert again.snapshot.validation == once.snapshot.validation


def test_a_larger_budget_continues_a_finished_run(lab: Any) -> None:
    """What was committed stays, the rest is trained once, and the new end is judged again."""
    once = lab.run(lab.job(sequences=48)).finished(48)
    run = lab.run(lab.job(sequences=96)).finished(96)
    assert {version: run.digests[version] for version in once.digests} == once.digests
    trained = Counter(
        p for batches in run.trained.values() for start, stop in batches for p in range(start, stop)
    )
    assert trained == Counter(range(48, 96))
    finals = [event["version"] for event in run.events("validated") if event["final"]]
    assert finals == [once.snapshot.version, run.snapshot.version]


def test_more_and_fewer_islands_continue_a_run(lab: Any) -> None:
    """Two islands, then three, then one: the fleet may change between two lives."""
    job = lab.job(sequences=192)
    lab.run(job, ("a", "b"), stop_when=lambda view: view.version >= 1)
    lab.run(job, ("a", "b", "c"), stop_when=lambda view: view.version >= 3)
    lab.run(job, ("c",)).finished(192)
