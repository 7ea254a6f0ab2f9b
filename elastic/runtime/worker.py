"""The Ray Train function: one rank of one island.

It builds what a rank needs from its surroundings (process group, device, model, corpus) and hands
over to `island_loop.run_island`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from torch.distributed.device_mesh import init_device_mesh

from elastic.base.config import Job
from elastic.base.errors import ElasticError
from elastic.exchange.ray_link import RayLink
from elastic.runtime.corpora import open_corpus
from elastic.runtime.island_loop import run_island
from elastic.runtime.island_rank import IslandRank
from elastic.runtime.island_store import IslandStore
from elastic.runtime.versions import library_versions
from elastic.state.storage import Storage
from elastic.training.corpus import Corpus
from elastic.training.group import Group
from elastic.training.inner import Inner
from elastic.training.model import build_model
from elastic.training.shard import compute_dtype_of, shard
from elastic.views.event_log import EventLog


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """What a worker is told when it starts."""

    job: Job
    island: str
    epoch: int
    start: int
    """How often this attempt has started the island; keeps the writers of events apart."""
    storage: Storage
    corpus_cache: str
    corpus_key: str
    manifest: str
    vocab_size: int
    threads: int
    synchronizer: Any


class WorkerError(Exception):
    """What was raised in a worker, as text: the user's own exception classes may not travel."""

    def __init__(self, what: str, traceback: str, exit_code: int, peer_lost: bool) -> None:
        super().__init__(what, traceback, exit_code, peer_lost)
        self.what, self.traceback = what, traceback
        self.exit_code, self.peer_lost = exit_code, peer_lost


def train_worker(config: dict[str, WorkerSpec]) -> str:
    """Run one rank until the island's work is done; returns how it ended. Raises WorkerError."""
    try:
        return train_rank(config["spec"])
    except Exception as error:
        what = str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"
        exit_code = error.exit_code if isinstance(error, ElasticError) else 1
        raise WorkerError(what, traceback.format_exc(), exit_code, is_lost_peer(error)) from None


def is_lost_peer(error: BaseException) -> bool:
    """Whether this rank only saw another one go: torch says so in its own types, and gloo in text."""
    if isinstance(error, RayActorError | dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def train_rank(spec: WorkerSpec) -> str:
    """One rank, from its surroundings to the end of its loop."""
    context = ray.train.get_context()
    number, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(spec.threads)
    device = ray.train.torch.get_device()
    mesh = init_device_mesh(device.type, (world_size,))
    # Agreements are small and on the CPU, whatever the tensors travel with.
    cpu_group: Any = None if device.type == "cpu" else dist.new_group(backend="gloo")
    job = spec.job
    model = build_model(job.model, spec.vocab_size, job.data.seq_len, job.seed)
    shard(model, mesh, compute_dtype_of(job.inner.compute_dtype, device))
    inner = Inner(
        model,
        job.inner,
        rank=number,
        world_size=world_size,
        device=device,
        mesh=mesh,
        seed=island_seed(job.seed, spec.island),
    )
    corpus = node_corpus(spec, context.get_local_rank(), cpu_group)
    writer = f"island-{spec.island}-a{spec.epoch}-{spec.start}"
    events = EventLog(spec.storage, writer) if number == 0 else Quiet()
    try:
        rank = IslandRank(
            name=spec.island,
            job=job,
            link=RayLink(spec.synchronizer),
            group=Group(number, world_size, cpu_group),
            inner=inner,
            corpus=corpus,
            events=events,
            versions=library_versions(),
            device=str(device),
        )
        rank.store = IslandStore(
            spec.storage,
            spec.island,
            rank.group,
            rank.parameters,
            events,
            epoch=spec.epoch,
            keep=job.checkpoint.keep,
        )
        return run_island(rank)
    finally:
        events.close()


def node_corpus(spec: WorkerSpec, local_rank: int, group: dist.ProcessGroup | None) -> Corpus:
    """The corpus on this node. Where the cache is not shared, one rank of the node tokenises it first."""
    arguments = (spec.job.data, spec.corpus_cache, spec.corpus_key, spec.manifest)
    corpus = open_corpus(*arguments) if local_rank == 0 else None
    dist.barrier(group=group)
    return corpus or open_corpus(*arguments)


def island_seed(seed: int, island: str) -> int:
    """Seed of an island's dropout: every island its own, the same in every life."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{island}".encode()).digest()[:6], "little")


class Quiet:
    """The event sink of ranks other than 0."""

    def emit(self, kind: str, fields: Any) -> None:
        """Rank 0 speaks for the island."""

    def close(self) -> None:
        """Nothing to write."""
