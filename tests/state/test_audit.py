"""The audit passes on a sound run, and names the file and its meaning on any other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elastic.base.config import Budget, Checkpoint, Data, Job, Outer
from elastic.base.errors import RunFolderError
from elastic.base.ranges import RangeSet
from elastic.state.audit import audit
from elastic.state.checkpoint import Rows, save_island
from elastic.state.layout import record_name
from elastic.state.outer_store import OuterStore
from elastic.state.records import load_records
from elastic.state.run_file import write_run
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit

TOTAL = 48
NAMES = [
    "run file", "records", "versions", "sequences", "contributions", "tensor files", "replay", "digests",
    "result", "island checkpoints", "corpus",
]  # fmt: skip


def draw(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of a small model."""
    generator = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(4, 3, generator=generator), "norm": torch.randn(3, generator=generator)}


def contribution(island: str, version: int, ranges: RangeSet) -> dict[str, object]:
    """One of two islands' share of a step."""
    return {
        "id": f"{island}/1/0/{version}", "island": island, "generation": 1, "seq": version,
        "base_version": version - 1, "from_step": 0, "to_step": 1, "tokens": 8, "steps": 1, "weight": 0.5,
        "ranges": ranges.to_json(),
    }  # fmt: skip


class Run:
    """A whole run folder written by the real writers: 2 islands, 12 outer steps, 2 attempts."""

    def __init__(self, folder: Path, steps: int = 12, corpus: bool = False) -> None:
        self.storage = Storage(folder)
        self.folder = folder
        self.job = Job(
            name="run",
            budget=Budget(tokens=1000),
            outer=Outer(lr=0.7, momentum=0.9, codec_down="bf16"),
            checkpoint=Checkpoint(snapshot_every=3, keep=2),
            data=Data(sources=[str(folder / "text")], seq_len=8),
        )
        self.epoch, self.segments = 0, 0
        manifest = self.prepare_corpus() if corpus else ""
        fields = {"run": "run-1", "job": self.job.model_dump(mode="json"), "seed": 0}
        write_run(self.storage, fields | ({"manifest": manifest} if corpus else {}))
        self.attempt()
        for number in range(steps):
            if number == 5:
                self.attempt()
            self.step()
        self.save_islands()
        self.write_result()

    def prepare_corpus(self) -> str:
        """Tokenise some text into the run folder."""
        from elastic.training.corpus import prepare

        (self.folder / "text").mkdir(parents=True)
        for number in range(8):
            (self.folder / "text" / f"{number}.txt").write_text(f"text {number} " * 50)
        return prepare(self.job.data, self.folder / "data").manifest_hash

    def attempt(self) -> None:
        """A driver begins."""
        self.epoch += 1
        self.store = OuterStore.open(
            self.storage, self.job, "run-1", self.epoch, load_records(self.storage), lambda: [draw(0)],
            {"total_sequences": TOTAL, "block_sequences": 4}, lambda *entry: None,
        )  # fmt: skip

    def step(self, digest: str = "") -> None:
        """An outer step of two islands, and the events of it."""
        version = self.store.version + 1
        start = 4 * version - 4
        halves = [RangeSet([(start, start + 2)]), RangeSet([(start + 2, start + 4)])]
        contributions = [contribution(n, version, r) for n, r in zip(("eu", "us"), halves, strict=True)]
        self.store.commit_outer(0, version, contributions, halves[0] | halves[1], draw(version), 1.0)
        announced = {"kind": "outer_step", "version": version, "fragment": 0, "digest": self.store.digest}
        adopted = {"kind": "adopted", "island": "eu", "version": version, "fragment": 0}
        self.events(
            announced, adopted | {"digest": digest or self.store.digest}, {"kind": "warning", "what": ""}
        )

    def events(self, *events: dict[str, object]) -> None:
        """One segment of events."""
        lines = [json.dumps({"time": 0.0, "writer": "w", "n": 0, **event}) for event in events]
        self.storage.create(f"events/w/{self.segments:06d}.jsonl", ("\n".join(lines) + "\n").encode())
        self.segments += 1

    def save_islands(self) -> None:
        """A complete checkpoint of each island, and one cut short."""
        for island, world_size in (("eu", 1), ("us", 2)):
            for rank in range(world_size):
                rows = {"p": Rows(2 * rank, torch.ones(2, 3), (2 * world_size, 3))}
                for number in (1, 2):
                    if (island, rank, number) != ("us", 1, 2):
                        save_island(
                            self.storage, f"islands/{island}", rank=rank, world_size=world_size,
                            generation=1, number=number, step=number, rows=rows, meta={},
                        )  # fmt: skip

    def write_result(self, **changed: object) -> None:
        """result.json as the controller writes it."""
        counters = self.store.counters
        result = {
            "status": "done", "exit_code": 0, "attempt": self.epoch, "versions": [self.store.version],
            "committed_sequences": len(self.store.committed), "total_sequences": TOTAL,
            "outer_steps": counters["outer_steps"], "synchronous_steps": counters["synchronous_steps"],
            "committed_tokens": counters["committed_tokens"], "digest": self.store.digest,
        }  # fmt: skip
        self.storage.write("result.json", json.dumps(result | changed).encode())

    def flip(self, name: str, position: int = -1) -> None:
        """Flip one bit of a file."""
        data = bytearray(self.storage.read(name))
        data[position] ^= 1
        self.storage.write(name, bytes(data))

    def failed(self) -> dict[str, str]:
        """Name and detail of the checks that fail."""
        found = audit(self.storage)
        return {check.name: check.detail for check in found.checks if not check.ok}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A sound run, without a corpus."""
    return Run(tmp_path / "run")


def test_a_sound_run_passes_every_check(tmp_path: Path) -> None:
    """All promises are checked, all are kept, and the numbers behind them are told."""
    run = Run(tmp_path / "run", corpus=True)
    found = audit(run.storage)
    details = {check.name: check.detail for check in found.checks}
    assert found.ok, details
    assert [check.name for check in found.checks] == NAMES
    assert details["records"] == "14 records of 2 attempts, unbroken"
    assert details["sequences"] == "48 committed once, 0 queued, 48 in all"
    assert "newest fragment 0: 12" in details["versions"]
    assert details["contributions"].startswith("24 merged")
    assert "5 kept files" in details["tensor files"]
    assert details["replay"].startswith("4 versions")
    assert details["digests"] == "24 reports of versions agree with the records"
    assert details["island checkpoints"] == "3 complete, hashes right; 1 unfinished"
    assert "1 tokenised corpus" in details["corpus"]
    assert found.to_json()["ok"] is True


def test_a_run_that_was_killed_passes(tmp_path: Path) -> None:
    """Without result.json, with sequences still queued, a run has broken no promise."""
    run = Run(tmp_path / "run", steps=7)
    run.storage.delete("result.json")
    found = audit(run.storage)
    assert found.ok, found.to_json()
    assert "28 committed once, 20 queued" in found.checks[3].detail


def test_a_run_without_records_yet_passes(tmp_path: Path) -> None:
    """A driver that was killed before its first record left nothing wrong."""
    storage = Storage(tmp_path)
    write_run(storage, {"run": "run-1"})
    assert audit(storage).ok


def test_no_run_is_a_wrong_folder_not_a_failed_audit(tmp_path: Path) -> None:
    """An empty folder is refused with exit code 2."""
    with pytest.raises(RunFolderError, match="not a run folder"):
        audit(Storage(tmp_path))


# ------------------------------------------------------------ the three that the project promises


def test_one_altered_byte_of_any_committed_file_is_named(tmp_path: Path) -> None:
    """Flip a bit in run.json, a record, a snapshot, a delta, a checkpoint or a shard: it is named."""
    run = Run(tmp_path / "run", corpus=True)
    committed = ["run.json", *(n for f in ("state", "outer", "islands", "data") for n in run.storage.list(f))]
    chosen = random.Random(1)
    for name in committed:
        if "us/000001-000002" in name:
            continue  # the checkpoint that was cut short is no promise
        if name.startswith("data/") and name.endswith(".json"):
            continue  # says how the shards were made; of it only hashes are promised
        data = run.storage.read(name)
        run.flip(name, chosen.randrange(len(data)))
        failed = run.failed()
        assert any(Path(name).name in detail for detail in failed.values()), (name, failed)
        run.storage.write(name, data)
    assert run.failed() == {}


@pytest.mark.parametrize("position", [0, 3, 6, 13])
def test_a_removed_record_is_named(run: Run, position: int) -> None:
    """Whichever record is missing, the first, a resume, one in the middle, or the last, the audit fails."""
    name = run.storage.list("state")[position]
    run.storage.delete(name)
    failed = run.failed()
    if position == 13:
        assert "version 12 was known to" in failed["digests"]
        assert "the records say [11]" in failed["result"]
    else:
        assert name in failed["records"]
        assert "is missing" in failed["records"]


def test_a_missing_version_is_named(run: Run) -> None:
    """A chain of records that jumps over a version is whole, and still fails."""
    run.attempt()
    run.store.versions[0] = 14
    run.store._append("outer", {"fragment": 0, "version": 14, "committed": [], "contributions": []})
    detail = run.failed()["versions"]
    assert "version 14 of fragment 0 follows version 12" in detail
    assert record_name(3, 15) in detail


# ----------------------------------------------------------------------------------- the others


def append(run: Run, **changed: object) -> None:
    """One more outer record, wrong in one point."""
    run.job = run.job.model_copy(update={"budget": Budget(tokens=2000)})
    version = run.store.version + 1
    run.store.versions[0] = version
    body = {"fragment": 0, "version": version, "committed": [], "contributions": []}
    run.store._append("outer", body | changed)


FAR = {"fragment": 0, "digest": "f" * 32}
BROKEN: list[tuple[str, str, Callable[[Run], object]]] = [
    ("sequences", r"commits 2 sequences \(10..11\) a second time",
     lambda run: append(run, committed=[[10, 12]])),
    ("sequences", r"3 sequences \(48..50\) are committed, but the budget has 48",
     lambda run: append(run, committed=[[48, 51]])),
    ("contributions", "commits 2 sequences, its contributions trained 0",
     lambda run: append(run, committed=[[46, 48]])),
    ("contributions", "contribution eu/1/0/5 was merged by .* already",
     lambda run: append(run, contributions=[contribution("eu", 5, RangeSet())])),
    ("contributions", "two contributions trained 2 sequences",
     lambda run: append(run, contributions=[contribution(n, 99, RangeSet([(0, 2)])) for n in ("eu", "us")])),
    ("contributions", "weights of its contributions add up to 1.5",
     lambda run: append(run, contributions=[contribution(n, 99, RangeSet()) for n in ("eu", "us", "ap")])),
    ("tensor files", "the file is missing", lambda run: run.storage.delete(run.storage.list("outer")[-1])),
    ("replay", "the file is missing", lambda run: run.storage.delete(run.storage.list("outer")[1])),
    ("digests", "eu held version 12 with digest f{12}.*trained from other parameters",
     lambda run: run.events({"kind": "adopted", "island": "eu", "version": 12, **FAR})),
    ("digests", "version 13 was known to w, but the records end at version 12",
     lambda run: run.events({"kind": "outer_step", "version": 13, **FAR})),
    ("digests", r"events/w/000000.jsonl:1: not an event",
     lambda run: run.storage.write("events/w/000000.jsonl", b"{x")),
    ("result", "outer_steps is 11, the records say 12", lambda run: run.write_result(outer_steps=11)),
    ("result", "digest is 0+, the records say", lambda run: run.write_result(digest="0" * 32)),
    ("result", "committed_sequences is 47, the records say 48",
     lambda run: run.write_result(committed_sequences=47)),
    ("result", "not JSON", lambda run: run.storage.write("result.json", b"{")),
    ("run file", "run.json is missing", lambda run: run.storage.delete("run.json")),
    ("records", "belongs to run run-1, run.json says run-2",
     lambda run: write_run(run.storage, {"run": "run-2"})),
    ("island checkpoints", "islands/eu/.*the file is not what its record says",
     lambda run: run.flip(next(n for n in run.storage.list("islands/eu") if n.endswith(".safetensors")))),
]  # fmt: skip


@pytest.mark.parametrize(("check", "says", "break_it"), BROKEN)
def test_a_broken_promise_is_named(
    run: Run, check: str, says: str, break_it: Callable[[Run], object]
) -> None:
    """Each kind of fault fails its own check with a message that says what and where."""
    import re

    break_it(run)
    failed = run.failed()
    assert check in failed
    assert re.search(says, failed[check]), failed[check]


def test_a_done_run_with_queued_sequences_is_not_done(tmp_path: Path) -> None:
    """`done` is only true when the whole budget is committed."""
    run = Run(tmp_path / "run", steps=7)
    assert "says done, but 28 of 48" in run.failed()["result"]
    run.write_result(status="stopped")
    assert run.failed() == {}


def test_a_result_of_an_earlier_attempt_is_no_fault(tmp_path: Path) -> None:
    """A second attempt that was killed leaves the first one's result.json; that one must still be right."""
    run = Run(tmp_path / "run", steps=7)
    run.write_result(status="stopped")
    run.attempt()
    run.step()
    assert run.failed() == {}
    run.write_result(status="stopped")
    assert run.failed() == {}
    run.storage.write(
        "result.json", json.dumps({"status": "failed", "versions": [], "outer_steps": 0}).encode()
    )
    assert run.failed() == {}


def test_steps_redone_after_lost_records_are_no_fault(run: Run) -> None:
    """After a fall-back the same versions come again with other digests; the old reports are put aside."""
    for name in run.storage.list("state")[-2:]:
        run.flip(name)
    run.attempt()
    assert run.store.version == 10
    for seed in (11, 12):
        version = run.store.version + 1
        ranges = RangeSet([(4 * version - 4, 4 * version)])
        parts = [contribution("us", 900 + version, ranges) | {"weight": 1.0}]
        run.store.commit_outer(0, version, parts, ranges, draw(500 + seed), 1.0)
    run.write_result()
    found = audit(run.storage)
    details = {check.name: check.detail for check in found.checks}
    assert found.ok, details
    assert "2 on abandoned branches" in details["records"]
    assert "4 of redone versions" in details["digests"]


def test_a_run_that_goes_on_during_the_audit_does_not_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are retired while the audit reads are looked up again, not reported."""
    listing, steps = Storage.list, [1]

    def list_and_go_on(self, folder=""):
        found = listing(self, folder)
        if folder == "outer" and steps:  # the tensor check has just begun
            run.store.job = run.job
            steps.pop()
            for name in listing(self, "outer"):
                self.delete(name)
            retired = [name for *_, name in run.store.kept]
            run.store.versions[0] += 1
            stored = run.store._write_snapshot(0)
            run.store._append(
                "anchor",
                {
                    "fragment": 0, "version": run.store.version, "tensors": stored, "retired": retired,
                    "digest": run.store.digest, "committed": [], "contributions": [],
                },
            )  # fmt: skip
            run.storage.delete("result.json")
        return found

    monkeypatch.setattr(Storage, "list", list_and_go_on)
    found = audit(run.storage)
    assert not steps
    assert found.ok, found.to_json()
