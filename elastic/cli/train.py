"""`elastic train`: read the files, start the run, show what happens, say how it ended."""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic.base.configfile import load_both


def train_command(job_file: Path, fleet_file: Path, overrides: Sequence[str], json: bool) -> None:
    """Train to the end, or until stopped; exits with the run's code."""
    job, fleet = load_both(job_file, fleet_file, overrides)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    from elastic.runtime.controller import train
    from elastic.runtime.signals import StopSignals

    signals = StopSignals()
    signals.install()
    with ExitStack() as stack:

        def listeners(storage: Any, run_folder: str) -> list[Any]:
            return _views(job.value, storage, run_folder, stack, quiet=json)

        result = train(
            job,
            fleet,
            signals=signals,
            listeners=listeners,
            in_ray_job="RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ,
        )
    if json:
        print(json_format.dumps(result.to_json()))
    else:
        from elastic.views.summary import summary

        print("\n".join(summary(result.to_json(), shlex.quote(result.run_folder))))
    sys.exit(result.exit_code)


def _views(job: Any, storage: Any, run_folder: str, stack: ExitStack, quiet: bool) -> list[Any]:
    """The console and the sinks that the job asks for; the stack closes them."""
    from elastic.views.console import Lines, LiveTable
    from elastic.views.sinks import TensorBoardSink, WandbSink

    views: list[Any] = []
    if not quiet:
        console = LiveTable(sys.stdout) if sys.stdout.isatty() else Lines(sys.stdout, job.logging.every_s)
        stack.callback(console.close)
        views.append(console.show)
    if job.logging.tensorboard:
        board = TensorBoardSink(storage)
        stack.callback(board.close)
        views.append(board)
    if job.logging.wandb_project:
        wandb = WandbSink(job.logging.wandb_project, job.name, job.model_dump(mode="json"))
        stack.callback(wandb.close)
        views.append(wandb)
    return views
