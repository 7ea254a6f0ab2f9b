#!/usr/bin/env python3
"""Write docs/reference/events.md from the catalogue in elastic/base/events.py; --check: say if it is old."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from elastic.base.events import KINDS  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "events.md"

MEANINGS = {
    "attempt": "Number of this life of the driver, from 1.",
    "bytes_down": "Bytes from the synchronizer to islands, total of the run.",
    "bytes_up": "Bytes from islands to the synchronizer, total of the run.",
    "committed_sequences": "Sequences committed so far, total of the run.",
    "committed_tokens": "Tokens committed so far, total of the run.",
    "continued": "False for a new run, true if it goes on from durable state.",
    "delay_s": "Seconds until the island is started again.",
    "delta_norm": "L2 norm of the merged update.",
    "device": "What its workers compute on.",
    "digest": "SHA-256 over names, shapes and fp32 bytes of the parameters; equal means bit-identical.",
    "done": "Amount done, in `unit`.",
    "epoch": "Number of the run lock that this attempt holds; later ones fence it off.",
    "exit_code": "Exit code of `elastic train`.",
    "files": "Names of source files.",
    "final": "True for the judgement of the last version on all held-out sequences.",
    "fragment": "Number of the fragment, from 0.",
    "generation": "Number of the island's incarnation; an older one is ignored.",
    "grad_norm": "Norm of the gradient before clipping.",
    "id": "`island/generation/fragment/seq` of a contribution, empty for another message.",
    "instead": "Name of the older file that is used.",
    "island": "Name of the island.",
    "islands": "Names of the islands that took part.",
    "key": "Dotted key of the configuration.",
    "loss": "Mean loss, nats per token.",
    "losses": "Mean training loss of each island since the last version, nats per token.",
    "lr": "Learning rate.",
    "manifest": "Hash of the manifest of source files.",
    "merge_s": "Seconds to merge and to make durable.",
    "name": "Name of a file in the run folder.",
    "nats_per_byte": "Loss per byte of text, comparable between tokenizers.",
    "phase": "`synchronous` (warm-up) or `outer`.",
    "reason": "Why, in words.",
    "region": "Region of the island.",
    "resumed_step": "Inner step it continues after; 0 without a checkpoint.",
    "returned_sequences": "Leased sequences that went back to the queue.",
    "run": "Name of the run.",
    "sequences": "Held-out sequences used.",
    "signal": "Name of the signal, null without one.",
    "skipped": "Source files that could not be read and were left out.",
    "stage": "What is being done.",
    "stall_s": "Seconds the inner loop has stood still for the exchange, since this incarnation began.",
    "status": "`done`, `stopped` or `failed`.",
    "step": "Inner steps of the island since the run began.",
    "tokens": "Tokens: in `island_progress` of this incarnation so far, in `outer_step` of this step.",
    "tokens_per_s": "Tokens per second of the island, lately.",
    "total": "Amount to do in `unit`, null if not known.",
    "total_sequences": "Sequences of the whole budget.",
    "train_bytes": "Bytes of training text.",
    "train_sequences": "Sequences of the training corpus.",
    "unit": "`bytes` or a word such as `files`.",
    "validation_bytes": "Bytes of held-out text.",
    "validation_sequences": "Sequences of the held-out corpus.",
    "value": "The value that was chosen.",
    "version": "Version of the outer parameters.",
    "versions": "Version of each fragment at the start.",
    "dropped_update_fraction": "Share of the update since the base that a blend gave up, in inner steps.",
    "what": "What happened, in words.",
    "why": "From what the value follows.",
    "workers": "Number of workers; in `island_starting` [smallest, largest].",
}


def page() -> str:
    """The whole page."""
    used = {field for kind in KINDS.values() for field in kind.fields}
    lines = [
        "# Events",
        "",
        "<!-- Written by scripts/events_page.py from elastic/base/events.py. Do not edit. -->",
        "",
        "Everything that happens in a run is one line of JSON in `events/<writer>/<number>.jsonl` of the",
        "run folder. Files are complete when they are visible and never change. Every event has `time`",
        "(Unix seconds of the writer's own clock, for people only), `writer`, `n` (counts the events of",
        "one writer; a gap is an `island_progress` that was left out while storage was away) and `kind`.",
        "Numbers that are not finite are the strings `nan`, `inf` and `-inf`.",
        "",
        "Writers are named after their attempt, so what repeats after a crash can be told apart. Sort by",
        "`time` to read several writers together, but keep the order of `n` within one writer.",
        "",
        "| kind | what it says | fields |",
        "|---|---|---|",
    ]
    for name, kind in KINDS.items():
        fields = ", ".join(f"`{field}`" for field in kind.fields)
        lines.append(f"| `{name}` | {kind.says} | {fields} |")
    lines += ["", "## Fields", "", "| field | meaning |", "|---|---|"]
    lines += [f"| `{field}` | {MEANINGS[field]} |" for field in sorted(used)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or compare it."""
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
            sys.exit(f"{PAGE.relative_to(ROOT)} is old: run scripts/events_page.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
