"""The actor that owns one island: its Ray Train run, on a stable node of its own region."""

from __future__ import annotations

import dataclasses
import tempfile
import traceback
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.exceptions import RayActorError, RayTaskError

from elastic.base.config import Fleet, Island
from elastic.base.errors import ElasticError
from elastic.base.known import known
from elastic.policy.placement import REGION_SHARE, worker_resources
from elastic.runtime.ray_types import remote
from elastic.runtime.worker import WorkerError, WorkerSpec, train_worker

train: Any = ray.train  # annotated as Train v1 and v2 at once, which fits neither
TRAIN_ENV = {
    # How long a worker group may wait for its workers; the controller has its own, longer patience.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    # How soon Ray Train sees that a worker has ended or died.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # On notice of a preemption Ray Train would restart the workers by itself; we decide (policy/recovery).
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an island's Ray Train run ended."""

    kind: str
    """finished; lost: a process, a node or a connection died; error: Python code raised."""
    what: str = ""
    traceback: str = ""
    exit_code: int = 1


@remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class IslandActor:
    """Runs `TorchTrainer.fit()` for one island; the Ray Train controller lives on this actor's node."""

    def run(self, fleet: Fleet, island: Island, spec: WorkerSpec) -> Outcome:
        """Train until the island's work is done, it is asked to stop, or it fails."""
        # Ray Train wants a folder for what is reported to it. Nothing is: the run folder holds it all.
        session = known(ray._private.worker.global_worker.node).get_session_dir_path()
        with tempfile.TemporaryDirectory(dir=session, ignore_cleanup_errors=True) as folder:
            return self._fit(fleet, island, spec, folder)

    def _fit(self, fleet: Fleet, island: Island, spec: WorkerSpec, folder: str) -> Outcome:
        trainer = train.torch.TorchTrainer(
            train_worker,
            train_loop_config={"spec": spec},
            scaling_config=scaling_of(fleet, island),
            run_config=train.RunConfig(
                name=f"{island.name}-a{spec.epoch}-{spec.start}",
                storage_path=folder,
                # Whether to start again is our policy's decision (policy/recovery), with its own budgets.
                failure_config=train.FailureConfig(max_failures=0),
                worker_runtime_env={"env_vars": worker_env(fleet, spec.threads)},
            ),
            torch_config=train.torch.TorchConfig(
                backend="cpu:gloo,cuda:nccl" if island.gpus_per_worker else "gloo",
                timeout_s=int(spec.job.outer.sync_timeout_s) + 60,
            ),
        )
        try:
            trainer.fit()
        except Exception as error:  # told to the controller as an outcome
            return outcome_of(error)
        return Outcome("finished")


def scaling_of(fleet: Fleet, island: Island) -> Any:
    """A `ScalingConfig` of workers min..max on the region's nodes: by label, and by custom resource.

    Ray Train's elastic policy reserves by resources alone, so a label without the resource would
    make it wait for ever on nodes of other regions.
    """
    workers = island.workers
    return train.ScalingConfig(
        num_workers=workers.min if workers.min == workers.max else (workers.min, workers.max),
        use_gpu=island.gpus_per_worker > 0,
        resources_per_worker=worker_resources(island, fleet.region_resource),
        label_selector={fleet.region_label: island.region},
    )


def worker_env(fleet: Fleet, threads: int) -> dict[str, str]:
    """Environment of a worker: its number of threads, and what the fleet file says; nothing else."""
    return {"OMP_NUM_THREADS": str(threads), **fleet.worker_env}


def outcome_of(error: BaseException) -> Outcome:
    """How the island ended, from what Ray Train raised.

    The first rank whose code raised speaks for the island. If none did, a process or a connection was
    lost: ranks that only saw their peer go do not count as errors.
    """
    failures = getattr(error, "worker_failures", None) or {0: error}
    outcomes = [_outcome_of_one(failures[rank]) for rank in sorted(failures)]
    return next((outcome for outcome in outcomes if outcome.kind == "error"), outcomes[0])


def _outcome_of_one(failure: BaseException) -> Outcome:
    cause = getattr(failure, "_base_exc", failure)  # Ray Train's envelope of an exception in a worker
    cause = getattr(cause, "health_check_failure", cause)  # and of a worker that does not answer
    if isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, WorkerError):
        return Outcome("lost" if cause.peer_lost else "error", cause.what, cause.traceback, cause.exit_code)
    what = f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"
    if isinstance(cause, RayActorError):
        return Outcome("lost", f"a worker died ({what})")
    text = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return Outcome("error", what, text, cause.exit_code if isinstance(cause, ElasticError) else 1)


def start_island(fleet: Fleet, island: Island) -> Any:
    """Create the actor of an island on a node of its region.

    It holds a share of the region's custom resource, so that its node never looks idle.
    """
    resources = {}
    if fleet.region_resource is not None:
        resources[fleet.region_resource.format(region=island.region)] = REGION_SHARE
    actor: Any = IslandActor  # as `remote` made it
    return actor.options(
        resources=resources,
        label_selector={fleet.region_label: island.region},
        runtime_env={"env_vars": TRAIN_ENV},
    ).remote()
