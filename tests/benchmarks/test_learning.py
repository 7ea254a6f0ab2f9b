"""The learning benchmark: which cells there are, what the tables say, and that it can be continued."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

from benchmarks.learning import __main__ as command  # noqa: E402
from benchmarks.learning import results as results_module  # noqa: E402
from benchmarks.learning.cells import HARNESS, PRESETS, VARIANTS, Cell, _diloco, choose  # noqa: E402
from benchmarks.learning.results import Results, load, open_results  # noqa: E402
from benchmarks.learning.table import BEGIN, END, markdown, page_part, rows_of, write_page  # noqa: E402
from elastic.base.configfile import load_job  # noqa: E402

pytestmark = pytest.mark.unit

TINY = """
name: tiny
model: {d_model: 16, num_layers: 1, num_heads: 2, ffn_dim: 32}
data: {sources: [text], validation_share: 0.3, seq_len: 16, tokenizer: {kind: bytes}}
budget: {tokens: 1000}
inner: {batch_sequences: 2, lr: 1e-2}
outer: {momentum: 0.3}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that trains in a second, on a few files."""
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} islands lie in the sea; " * 12, "utf-8")
    text = TINY.replace("[text]", f"[{tmp_path / 'text'}]")
    (tmp_path / "tiny.yaml").write_text(text, "utf-8")
    monkeypatch.setattr(command, "QUICK_TOKENS", 5120)
    return tmp_path / "tiny.yaml"


def run(job: Path, *more: str) -> int:
    folder = job.parent
    where = ["--job", str(job), "--cache", str(folder / "cache"), "--results", str(folder / "results")]
    return command.main(["--quick", "--json", *where, *more])


def figures(label: str, islands: int, seed: int, loss: float, warmup: int, after: int) -> dict[str, Any]:
    """A cell of 100 tokens, 25 of them in the warm-up; `synchronous` has nothing after it."""
    return {
        "label": label,
        "islands": islands,
        "seed": seed,
        "loss": loss,
        "tokens": 100,
        "tokens_warmup": 100 if label == "synchronous" else 25,
        "outer_steps": 0 if label == "synchronous" else 3,
        "bytes": warmup + after,
        "bytes_warmup": warmup,
        "cpu_s": 60.0,
        "digest": "d",
    }


PAIR = [
    figures("synchronous", 2, 0, 2.0, 4_000_000, 0),
    figures("synchronous", 2, 1, 1.0, 4_000_000, 0),
    figures("diloco", 2, 0, 2.02, 1_000_000, 150_000),
    figures("diloco", 2, 1, 1.03, 1_000_000, 150_000),
]


def configuration() -> dict[str, Any]:
    return {
        "tokens": 100,
        "job": {"inner": {"batch_sequences": 8}, "data": {"seq_len": 128}},
        "corpus": {"validation_sequences": 10},
        "machine": {"cores": 2, "cpu": "a CPU", "python": "3.12"},
        "versions": {"torch": "2.6"},
    }


# ------------------------------------------------------------------------------------------- cells


def test_the_main_table_is_complete() -> None:
    """Every preset meets every number of islands and every seed, once; variants are one seed's."""
    cells = choose([1, 2, 4], range(3), ["main", "variants"])
    assert len({cell.key for cell in cells}) == len(cells) == 3 * 3 * len(PRESETS) + len(VARIANTS)
    assert {(cell.islands, cell.seed) for cell in cells if cell.is_variant} == {(2, 0)}


def test_rows_are_jobs_of_the_quickstart() -> None:
    """Every row's overrides fit the quickstart job, and no two rows are the same run."""
    outers = [
        load_job(ROOT / "jobs" / "quickstart.yaml", overrides).value.outer
        for overrides in (PRESETS | VARIANTS).values()
    ]
    assert len(set(outers)) == len(outers)


def test_diloco_is_the_quickstart() -> None:
    """The table's `diloco` has the outer optimiser that `make train` uses."""
    path, kept = ROOT / "jobs" / "quickstart.yaml", {"island_timeout_s"}
    row, job = (load_job(path, overrides).value.outer for overrides in (PRESETS["diloco"], ()))
    assert row.model_dump(exclude=kept) == job.model_dump(exclude=kept)


def test_unknown_rows_are_refused() -> None:
    """A row that does not exist is named, with those that do."""
    with pytest.raises(
        ValueError, match=r"no cells are called 'dilco'; there are main, variants, synchronous"
    ):
        choose([2], [0], ["dilco"])


# ------------------------------------------------------------------------------------------ tables


def test_gaps_are_paired() -> None:
    """The gap is taken seed by seed, and bytes are compared for the same tokens."""
    baseline, diloco = rows_of(PAIR)
    assert diloco.gap_percent is not None
    assert (diloco.gap_percent.low, diloco.gap_percent.high) == pytest.approx((1.0, 3.0))
    assert diloco.gap_percent.mean == pytest.approx(2.0)
    assert diloco.ratio_after == pytest.approx(150_000 / (4_000_000 * 0.75))
    assert diloco.ratio_whole == pytest.approx(1_150_000 / 4_000_000)
    assert baseline.gap_percent is not None
    assert baseline.gap_percent.mean == 0.0


def test_a_row_without_its_baseline_claims_nothing() -> None:
    """Without `synchronous` of the same seed and islands there is no gap and no ratio."""
    other = figures("synchronous", 4, 0, 2.0, 4_000_000, 0)
    row = next(row for row in rows_of([PAIR[2], other]) if row.label == "diloco")
    assert (row.gap_percent, row.ratio_after, row.ratio_whole) == (None, None, None)


def test_table_as_text() -> None:
    """A line says loss, spread, paired gap, steps, bytes and shares."""
    lines = markdown(rows_of(PAIR)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| 2 | synchronous | 2 | 1.5000 (1.0000 to 2.0000) | - | - | - | 4.0 MB | 1 | 1 |"
    assert lines[3] == (
        "| 2 | diloco | 2 | 1.5250 (1.0300 to 2.0200) | +2.00 % (+1.00 to +3.00) | 3 | 1.0 MB | 150 kB "
        "| 1/20.0 | 1/3.5 |"
    )


def test_page_keeps_what_people_wrote(tmp_path: Path) -> None:
    """Only what is between the markers is replaced, as often as one likes; without markers nothing is."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    keyed = {f"{cell['label']}/{cell['islands']}/{cell['seed']}": cell for cell in PAIR}
    check = {"diloco/2/0": {"loss": 2.02, "digest": "other"}}
    whole = {"configuration": configuration(), "cells": keyed, "cross_checks": check}
    for _ in range(2):
        write_page(page, page_part(whole, "2026-01-01.json"))
    text = page.read_text("utf-8")
    assert text.startswith(f"before\n{BEGIN}\n\n100 tokens a run, 8 sequences of 128 tokens per island")
    assert text.endswith(f"{END}\nafter\n")
    assert "| diloco | 2 | 0 | 2.0200 | 2.0200 | +0.00 % | no |" in text
    assert "old" not in text
    page.write_text("no markers\n", "utf-8")
    with pytest.raises(ValueError, match="must hold"):
        write_page(page, "part")


# ----------------------------------------------------------------------------------------- results


def test_only_the_same_configuration_is_continued(tmp_path: Path) -> None:
    """A file is continued by its own configuration; another one starts a file of its own."""
    first = open_results(tmp_path, {"tokens": 1}, "2026-01-01")
    first.cells["diloco/2/0"] = PAIR[2]
    first.save()
    assert open_results(tmp_path, {"tokens": 1}, "2026-01-02").cells == first.cells
    other = open_results(tmp_path, {"tokens": 2}, "2026-01-01")
    assert (other.cells, other.path.name) == ({}, "2026-01-01-02.json")


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    """A file of another version is not misread."""
    (tmp_path / "a.json").write_text(json.dumps({"format": results_module.FORMAT + 1}), "utf-8")
    with pytest.raises(ValueError, match="this version reads"):
        load(tmp_path / "a.json")


def test_done_cells_survive_a_failure(tmp_path: Path) -> None:
    """A cell that fails is reported and takes nothing with it: the others are in the file."""
    results = Results(tmp_path / "r.json", {})
    cells = [Cell("diloco", 2, seed, ()) for seed in range(3)]

    def run_one(cell: Cell) -> dict[str, Any]:
        if cell.seed == 1:
            raise RuntimeError("exit code 9: killed")
        return {**PAIR[2], "seed": cell.seed, "wall_s": 1.0}

    assert command.run_cells(cells, results, 1, run_one) == {"diloco/2/1": "exit code 9: killed"}
    assert sorted(load(results.path).cells) == ["diloco/2/0", "diloco/2/2"]


# --------------------------------------------------------------------------------------- the command


@pytest.mark.timeout(300)
def test_quick_run_then_continue(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--quick` trains real cells on equal tokens; a second call runs what is missing and nothing else."""
    page = job.parent / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n", "utf-8")
    assert run(job, "--cells", "diloco") == 0
    first = json.loads(capsys.readouterr().out)
    assert list(first["cells"]) == ["diloco/2/0"]
    assert first["rows"][0]["gap_percent"] is None

    begun: list[str] = []
    real = command.ask
    monkeypatch.setattr(command, "ask", lambda cell, *rest: begun.append(cell.key) or real(cell, *rest))
    assert run(job, "--write-page", "--page", str(page)) == 0
    out = json.loads(capsys.readouterr().out)
    assert begun == ["synchronous/2/0"]
    assert out["file"] == first["file"]
    diloco, synchronous = out["cells"]["diloco/2/0"], out["cells"]["synchronous/2/0"]
    assert diloco == first["cells"]["diloco/2/0"]
    # 320 sequences, 2 islands of 2: 80 steps, a quarter of them synchronous, then a delta every 20.
    assert diloco["tokens"] == synchronous["tokens"] == 5120
    assert (diloco["synchronous_steps"], diloco["outer_steps"]) == (20, 3)
    assert (synchronous["synchronous_steps"], synchronous["outer_steps"]) == (80, 0)
    assert diloco["bytes"] < synchronous["bytes"] == synchronous["bytes_warmup"]
    assert abs(out["rows"][1]["gap_percent"]["mean"]) < 50
    assert "| 2 | diloco |" in page.read_text("utf-8")


def test_changed_values_run_again(job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A cell whose row stands for other outer values than it was run with is run again."""
    begun: list[str] = []
    outer = load_job(job, [*PRESETS["diloco"], *HARNESS]).value.outer.model_dump(mode="json")

    def pretend(cell: Cell, *_: Any) -> dict[str, Any]:
        begun.append(cell.key)
        return {**PAIR[2], "wall_s": 1.0, "outer": outer}

    monkeypatch.setattr(command, "ask", pretend)
    for _ in range(2):
        assert run(job, "--cells", "diloco") == 0
    assert begun == ["diloco/2/0"]
    monkeypatch.setitem(PRESETS, "diloco", _diloco(lr=0.5))
    assert run(job, "--cells", "diloco") == 0
    assert begun == ["diloco/2/0"] * 2


def test_wrong_options_are_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that does not exist, or a cross-check without its cell, ends with 2 before anything runs."""
    assert run(job, "--cells", "dilco") == 2
    assert "no cells are called 'dilco'" in capsys.readouterr().err
    assert run(job, "--cross-check", "diloco/2/0=nowhere") == 2
    assert "no cell 'diloco/2/0'" in capsys.readouterr().err


def test_cross_check_must_be_the_same_run(tmp_path: Path) -> None:
    """Only a finished run with the same islands, tokens and steps stands beside a cell."""
    cell = {**PAIR[2], "synchronous_steps": 4}
    results = Results(tmp_path / "r.json", {}, {"diloco/2/0": cell})
    found = {
        "status": "done",
        "islands": 2,
        "committed_tokens": 100,
        "outer_steps": 3,
        "synchronous_steps": 4,
        "final_val_loss": 2.03,
        "digest": "d",
        "bytes_up": 1,
        "wall_s": 1.0,
        "reason": "",
    }
    (tmp_path / "result.json").write_text(json.dumps(found), "utf-8")
    command.add_cross_check(results, f"diloco/2/0={tmp_path}")
    assert load(results.path).cross_checks["diloco/2/0"]["loss"] == 2.03
    (tmp_path / "result.json").write_text(json.dumps({**found, "outer_steps": 4}), "utf-8")
    with pytest.raises(ValueError, match="outer_steps is 4, not 3"):
        command.add_cross_check(results, f"diloco/2/0={tmp_path}")
