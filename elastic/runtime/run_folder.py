"""Open a run: find or make its folder, win its lock, and refuse what would make it another run."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from elastic.base.config import ExistingCluster, Fleet, Job
from elastic.base.errors import LockHeldError, RunFolderError, StorageError
from elastic.base.known import known
from elastic.runtime.versions import library_versions
from elastic.state.lock import RunLock
from elastic.state.run_file import read_run, write_run
from elastic.state.storage import Storage

BEAT_EVERY_S = 3.0
TAKEOVER_S = 30.0
"""A driver on another host is taken for dead when its counter stands still for this long."""

FROZEN = ("model", "data", "seed", "inner.batch_sequences", "outer.fragments", "outer.fragment_pattern")
"""What makes a run this run; everything else may change when it is continued."""
FREE = ("data.cache_folder",)


def open_storage(job: Job, fleet: Fleet, in_ray_job: bool) -> Storage:
    """The run folder, made if it is not there, and found to be writable."""
    storage = storage_of(job, fleet, in_ray_job)
    storage.probe()
    return storage


def storage_of(job: Job, fleet: Fleet, in_ray_job: bool) -> Storage:
    """The run folder, untouched; a relative one is refused where it would be lost.

    A Ray job runs in a throw-away copy of the working directory on whichever node is free.
    """
    folder = known(job.run_folder)
    if "://" not in folder and not Path(folder).is_absolute():
        if in_ray_job or isinstance(fleet.cluster, ExistingCluster):
            where = "under a Ray job" if in_ray_job else "on an existing cluster"
            raise RunFolderError(
                f"a relative run folder {where} would be a new, empty one with each submission",
                where="run_folder",
                saw=folder,
                fix="give an absolute path on a file system that all nodes mount, or a bucket: "
                "run_folder=/mnt/runs/NAME or run_folder=s3://BUCKET/runs/NAME",
            )
        folder = str(Path(folder).absolute())
    return Storage(folder)


class LockKeeper:
    """Holds the run lock and beats it from a thread; `lost` says that another driver took over."""

    def __init__(self, storage: Storage) -> None:
        self._lock = RunLock(storage, attempt=f"begun {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
        self._over = threading.Event()
        self.lost = ""
        self.epoch = self._lock.acquire(TAKEOVER_S)
        self._thread = threading.Thread(target=self._run, name="elastic-lock", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(BEAT_EVERY_S):
            try:
                self._lock.beat()
                self._lock.require()
            except LockHeldError as error:
                self.lost = str(error)
                return
            except StorageError:
                continue  # storage is away; whoever takes over meanwhile is seen at the next beat

    def release(self) -> None:
        """Let the next driver in at once."""
        self._over.set()
        self._thread.join(timeout=BEAT_EVERY_S + 5.0)
        if not self.lost:
            self._lock.release()


@dataclass(frozen=True)
class Identity:
    """What run.json says."""

    run: str
    continued: bool


def identify(storage: Storage, job: Job, fleet: Fleet, corpus: Mapping[str, Any]) -> Identity:
    """Write run.json of a new run, or check that this job may continue the run that is there.

    `corpus`: manifest hash, vocabulary size and the like of the prepared data.
    """
    refuse_other_job(storage, job)
    there = read_run(storage)
    if there is not None and there.get("manifest") != corpus["manifest"]:
        raise _other_run(
            storage, [f"data: manifest {there['manifest'][:12]} in the run, {corpus['manifest'][:12]} now"]
        )
    run = there["run"] if there else f"{job.name}-{secrets.token_hex(4)}"
    fields = {
        "run": run,
        "job": job.model_dump(mode="json"),
        "fleet": fleet.model_dump(mode="json"),
        "versions": library_versions(),
        "seed": job.seed,
        **corpus,
    }
    write_run(storage, fields)
    return Identity(run, there is not None)


def refuse_other_job(storage: Storage, job: Job) -> None:
    """Raise RunFolderError with all differences if this job may not continue the run that is there."""
    there = read_run(storage)
    if there is None:
        return
    before, now = _flat(there["job"]), _flat(job.model_dump(mode="json"))
    differences = [
        f"{key}: {json.dumps(before.get(key))} in the run, {json.dumps(now.get(key))} now"
        for key in sorted(before.keys() | now.keys())
        if _is_frozen(key) and before.get(key) != now.get(key)
    ]
    if differences:
        raise _other_run(storage, differences)


def _other_run(storage: Storage, differences: list[str]) -> RunFolderError:
    return RunFolderError(
        "the run folder holds a run with another model, data, seed, batch or fragments",
        where=storage.url,
        saw="; ".join(differences),
        fix="give these values back, or begin a new run: run_folder=NEW (init_from=OLD keeps its weights)",
    )


def _is_frozen(key: str) -> bool:
    return key not in FREE and any(key == frozen or key.startswith(f"{frozen}.") for frozen in FROZEN)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat
