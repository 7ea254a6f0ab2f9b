"""`elastic train`: read the files, start the run, show what happens, say how it ended."""

from __future__ import annotations

import hashlib
import json as json_format
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.base.config import Fleet, Job, LocalCluster
from elastic.base.configfile import load_both

if TYPE_CHECKING:
    from elastic.state.storage import Storage


def train_command(job_file: Path, fleet_file: Path, overrides: Sequence[str], json: bool) -> None:
    """Train to the end, or until stopped; exits with the run's code."""
    job, fleet = load_both(job_file, fleet_file, overrides)
    in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    check_first(job.value, fleet.value, in_ray_job)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if isinstance(fleet.value.cluster, LocalCluster):
        _keep_private(os.environ)

    from elastic.runtime.controller import train
    from elastic.runtime.signals import StopSignals
    from elastic.views.event_log import plain

    signals = StopSignals()
    signals.install()
    with ExitStack() as stack:

        def listeners(storage: Storage) -> list[Any]:
            return _views(job.value, storage, stack, quiet=json)

        result = train(
            job,
            fleet,
            signals=signals,
            listeners=listeners,
            in_ray_job=in_ray_job,
        )
    if json:
        print(json_format.dumps(plain(result.to_json())))
    else:
        from elastic.views.summary import summary

        folder = shlex.quote(result.run_folder)
        lines = summary(result.to_json(), folder, own_command(), job.value.logging.tensorboard)
        print("\n".join(lines), flush=True)
    if result.status == "failed":
        print(result.reason, file=sys.stderr)  # the traceback of the user's code comes last
    sys.exit(result.exit_code)


def _keep_private(environment: MutableMapping[str, str]) -> None:
    """A Ray of our own lets nobody else in, whatever tokens this user's HOME holds for other clusters.

    Without a token, whoever reaches its ports can run code.
    """
    if environment.setdefault("RAY_AUTH_MODE", "token") == "token":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def own_command() -> str:
    """How this program was called, so that the next command can be copied: it may not be on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "elastic":
        return "python -m elastic"
    on_path = shutil.which("elastic")
    if on_path is not None and Path(on_path).resolve() == called.resolve():
        return "elastic"
    return shlex.quote(os.path.relpath(called) if called.is_relative_to(Path.cwd()) else str(called))


def check_first(job: Job, fleet: Fleet, in_ray_job: bool) -> None:
    """Whatever can be refused without torch and Ray, whose imports alone take seconds."""
    from elastic.runtime.run_folder import refuse_other_job, storage_of
    from elastic.state.run_file import read_run
    from elastic.training.listing import check_sources

    storage = storage_of(job, fleet, in_ray_job)
    if read_run(storage) is None:
        check_sources(job.data)  # before the run folder is made; a run that is there has its own copy
    else:
        refuse_other_job(storage, job)
    storage.probe()


def _views(job: Job, storage: Storage, stack: ExitStack, quiet: bool) -> list[Any]:
    """The console and the sinks that the job asks for; the stack closes them."""
    from elastic.views.console import open_console
    from elastic.views.sinks import TensorBoardSink, WandbSink

    views: list[Any] = []
    if not quiet:
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        console = open_console(sys.stdout, job.logging.every_s, terminal=terminal)
        stack.callback(console.close)
        views.append(console.show)
    if job.logging.tensorboard:
        board = TensorBoardSink(storage)
        stack.callback(board.close)
        views.append(board)
    if job.logging.wandb_project:
        run_id = hashlib.sha256(storage.url.encode()).hexdigest()[:16]  # one W&B run for all attempts
        wandb = WandbSink(job.logging.wandb_project, f"{job.name}-{run_id}", job.model_dump(mode="json"))
        stack.callback(wandb.close)
        views.append(wandb)
    return views
