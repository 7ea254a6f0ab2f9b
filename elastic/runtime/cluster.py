"""The Ray cluster: connect to one or start a simulated one, and describe its nodes as plain records."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.base.config import ExistingCluster, Fleet
from elastic.base.errors import PlacementError, RunFolderError
from elastic.base.known import known
from elastic.policy.placement import NodeRecord
from elastic.runtime.signals import StopSignals
from elastic.state.storage import Storage

MB = 2**20
OBJECT_STORE_MB = 512
"""Of each simulated node."""
NAMESPACE = "elastic"
REGION_UNITS = 1000
"""How much of its region's custom resource a simulated node has."""
SPARE_CPUS = 1
PROBE_TIMEOUT_S = 60.0
LONGEST_REPORT = 300
"""Characters of a report of Ray's that are passed on."""


def announcement(fleet: Fleet) -> str:
    """What `connected` is about to do, in words."""
    if isinstance(fleet.cluster, ExistingCluster):
        return f"connecting to the Ray cluster at {fleet.cluster.address}"
    regions = len({island.region for island in fleet.islands})
    return f"starting Ray on this machine: a head and {regions} simulated nodes"


@contextlib.contextmanager
def connected(
    fleet: Fleet, signals: StopSignals, tell: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Be connected to the fleet's cluster; a simulated one ends with the block.

    `tell` gets what Ray reports about its processes, as one killed for want of memory. Raises Interrupted
    if a stop signal comes before the block begins.
    """
    logging.getLogger("ray").setLevel(logging.WARNING)  # what the user needs to know is said by our events

    def report(data: dict[str, Any], ignore_prefix: bool) -> None:
        text = " ".join(" ".join(data["lines"]).split())
        tell(f"Ray: {text.split(' Lease ID')[0][:LONGEST_REPORT]}")

    existing = fleet.cluster if isinstance(fleet.cluster, ExistingCluster) else None
    with (
        _instead(ray._private.worker, "print_to_stdstream", report),
        contextlib.nullcontext(existing.address) if existing else _simulated(fleet, signals) as address,
    ):
        try:
            _connect(address, signals)
            signals.check()
            yield
        finally:
            ray.shutdown()


def _connect(address: str, signals: StopSignals) -> None:
    try:
        with _our_handlers(signals):
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise PlacementError(
            "no Ray cluster answers",
            where=f"cluster.address {address}",
            saw=str(error).splitlines()[0],
            fix="start one (`ray start --head`), correct the address, or use `cluster: {kind: local}`",
        ) from error
    if signals.installed:
        signals.install()  # Ray's core has put a handler of its own under Python's, which aborts


def _our_handlers(signals: StopSignals) -> contextlib.AbstractContextManager[None]:
    """Keep Ray's SIGTERM handlers out: they raise SystemExit anywhere, even where it is swallowed."""
    if not signals.installed:
        return contextlib.nullcontext()
    return _instead(ray._private.utils, "set_sigterm_handler", lambda handler: None)


@contextlib.contextmanager
def _instead(module: Any, name: str, ours: Callable[..., None]) -> Iterator[None]:
    """Our function in place of one of Ray's own; the names are those of Ray 2.60, which is pinned."""
    theirs = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, theirs)


@contextlib.contextmanager
def _simulated(fleet: Fleet, signals: StopSignals) -> Iterator[str]:
    """A Ray cluster on this machine: a head, and a node per region that carries its label."""
    cluster = Cluster()
    try:
        with _our_handlers(signals):
            _add_nodes(cluster, fleet, signals)
        signals.check()  # a signal to the whole process group has ended the head too: nobody would answer
        yield known(cluster.address)
    finally:
        session = cluster.head_node.session_name if cluster.head_node else ""
        cluster.shutdown()
        _end_orphans(session)


_RAYS_OWN = (b"/ray/_private/", b"/ray/dashboard/", b"/ray/core/")
"""Parts of the paths of Ray's own programs: nothing else that names a session is ended."""


def _end_orphans(session: str) -> None:
    """End what a signal to the whole process group has orphaned of our own session.

    A worker or an agent whose raylet dies while it starts waits a minute before it gives up.
    """
    if not session:
        return
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if session.encode() in command and any(part in command for part in _RAYS_OWN):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


def _add_nodes(cluster: Cluster, fleet: Fleet, signals: StopSignals) -> None:
    """One after another: two nodes that start at once get in each other's way."""
    size = OBJECT_STORE_MB * MB
    cluster.add_node(
        num_cpus=1,
        object_store_memory=size,
        # The dashboard serves the State API, by which Ray Train cleans up after a lost actor.
        include_dashboard=True,
        dashboard_port=free_port(),
        dashboard_agent_listen_port=free_port(),  # by default a fixed one: a second run would not get it
        # Nobody needs these here: nodes do not come and go, and workers' logs stay in their files.
        no_monitor=True,
        include_log_monitor=False,
    )
    for region, islands in _by_region(fleet).items():
        signals.check()
        resources = {}
        if fleet.region_resource is not None:
            resources[fleet.region_resource.format(region=region)] = REGION_UNITS
        cluster.add_node(
            num_cpus=sum(i.workers.max * i.cpus_per_worker for i in islands) + SPARE_CPUS,
            num_gpus=sum(i.workers.max * i.gpus_per_worker for i in islands),
            labels={fleet.region_label: region},
            resources=resources,
            object_store_memory=size,
        )


def _by_region(fleet: Fleet) -> dict[str, list[Any]]:
    regions: dict[str, list[Any]] = {}
    for island in fleet.islands:
        regions.setdefault(island.region, []).append(island)
    return regions


def free_port() -> int:
    """A TCP port that is free now on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def nodes() -> list[NodeRecord]:
    """The cluster's living nodes."""
    free = ray._private.state.available_resources_per_node()  # the public call sums over nodes
    return [
        NodeRecord(
            node_id=node["NodeID"],
            alive=node["Alive"],
            resources=node["Resources"],
            available=free.get(node["NodeID"], {}),
            labels=node.get("Labels") or {},
            draining=bool(node.get("DeathReason")) and not node["Alive"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def pinned_to(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Schedule on this node and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def own_node_id() -> str:
    """The node of this process."""
    return ray.get_runtime_context().get_node_id()


def check_shared(storage: Storage) -> None:
    """Every node must see the run folder: each reads what this process wrote, and writes.

    A local path is only asked for on clusters of several hosts, where it must be a shared mount.
    """
    hosts = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) == 1:
        return
    marker = f"lock/seen-by-{own_node_id()[:12]}"
    storage.write(marker, b"written by the driver")
    probes = {
        host: _probe.options(scheduling_strategy=pinned_to(node)).remote(storage, marker)
        for host, node in hosts.items()
    }
    try:
        for host, probe in probes.items():
            try:
                problem = ray.get(probe, timeout=PROBE_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                problem = f"no answer within {PROBE_TIMEOUT_S:g} s"
            if problem:
                raise RunFolderError(
                    "the run folder is not the same on every node",
                    where=f"host {host}, {storage.url}",
                    saw=problem,
                    fix="use a bucket (s3://..., gs://...) or a folder on a file system that all nodes mount",
                )
    finally:
        storage.delete(marker)


@ray.remote(num_cpus=0)
def _probe(storage: Storage, marker: str) -> str:
    """What is wrong with the run folder on this node; empty if nothing is."""
    try:
        storage.probe(must_see=marker)
    except Exception as error:  # the driver reports it with the host's name
        return f"{type(error).__name__}: {error}"
    return ""
