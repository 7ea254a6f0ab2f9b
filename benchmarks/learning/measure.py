"""One cell, in a process of its own: `python -m benchmarks.learning.measure` reads a request and answers.

The request is one JSON object on standard input (`job` file, `overrides`, `islands`, `corpus` folder), the
answer one on standard output. A process each, so that cells share nothing and use one thread for arithmetic.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.learning.cells import HARNESS
from elastic.base.configfile import load_job
from elastic.runtime.in_process import run_in_process
from elastic.state.storage import Storage

LONGEST_S = 12 * 3600.0


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Run one cell and return its figures.

    Raises RuntimeError when the run did not go as it must: an island failed, data was trained on twice,
    or the last version was not judged.
    """
    torch.set_num_threads(1)
    job = load_job(request["job"], [*request["overrides"], *HARNESS]).value
    began, cpu = time.perf_counter(), time.process_time()
    names = tuple(f"island-{number}" for number in range(request["islands"]))
    with tempfile.TemporaryDirectory(prefix="elastic-learning-") as folder:
        run = run_in_process(job, request["corpus"], Storage(folder), names, timeout_s=LONGEST_S)
    for name, error in run.errors.items():
        raise RuntimeError(f"{name} failed") from error
    snapshot = run.snapshot
    if snapshot is None or not snapshot.finished or not snapshot.validation.get("final"):
        raise RuntimeError(f"the run did not finish: {snapshot}")
    counters = snapshot.counters
    if counters["replayed_sequences"]:
        raise RuntimeError(f"{counters['replayed_sequences']} sequences were trained on twice")
    tokens_per_step = request["islands"] * job.inner.batch_sequences * job.data.seq_len
    tokens = snapshot.committed_sequences * job.data.seq_len
    return {
        "loss": snapshot.validation["loss"],
        "nats_per_byte": snapshot.validation["nats_per_byte"],
        "validation_sequences": snapshot.validation["sequences"],
        "tokens": tokens,
        "tokens_warmup": min(tokens, int(counters["synchronous_steps"]) * tokens_per_step),
        "synchronous_steps": int(counters["synchronous_steps"]),
        "outer_steps": int(counters["outer_steps"]),
        "bytes_warmup": int(counters["bytes_up_warmup"] + counters["bytes_down_warmup"]),
        "bytes": int(counters["bytes_up"] + counters["bytes_down"]),
        "bytes_up": int(counters["bytes_up"]),
        "bytes_down": int(counters["bytes_down"]),
        "digest": snapshot.digest,
        "outer": job.outer.model_dump(mode="json"),
        "cpu_s": round(time.process_time() - cpu, 1),
        "wall_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Answer one request."""
    print(json.dumps(measure(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
