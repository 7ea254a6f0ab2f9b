"""Where islands fit: from plain records of the cluster's nodes to numbers and sentences.

The runtime turns what Ray knows into `NodeRecord`s and asks. A node counts for an island if it is
alive, is not being drained and carries the island's region label, and the region's custom resource
where the fleet names one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.base.config import Island

REGION_SHARE = 0.001
"""How much of the region's custom resource each worker takes: enough to be bound to it."""
MARKET_LABEL = "ray.io/market-type"
"""Ray's own label; `spot` on nodes that may be taken away at any time."""


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """One node as the cluster reports it. `resources` are all it has, `available` what is free now."""

    node_id: str
    alive: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)
    available: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False

    @property
    def usable(self) -> bool:
        """Whether work may be put here."""
        return self.alive and not self.draining

    @property
    def is_spot(self) -> bool:
        """Whether the node may be taken away at any time."""
        return self.labels.get(MARKET_LABEL) == "spot"


@dataclass(frozen=True)
class Fit:
    """How an island fits into the cluster as it is."""

    island: str
    workers_min: int
    workers_max: int
    fits_now: int
    """Workers that fit into what is free, at most `workers_max`."""
    fits_ever: int
    """Workers that would fit if nothing else ran, at most `workers_max`."""
    sentence: str
    """What is wanted and what is there."""

    @property
    def starts_now(self) -> bool:
        """Whether the island's smallest size is free."""
        return self.fits_now >= self.workers_min

    @property
    def ever(self) -> bool:
        """Whether these nodes can hold the island's smallest size at all."""
        return self.fits_ever >= self.workers_min


def worker_resources(island: Island, region_resource: str | None) -> dict[str, float]:
    """What one worker of the island reserves."""
    needs = {"CPU": island.cpus_per_worker, "GPU": island.gpus_per_worker}
    if region_resource is not None:
        needs[region_resource.format(region=island.region)] = REGION_SHARE
    return {name: amount for name, amount in needs.items() if amount > 0}


def fit(
    islands: Sequence[Island], nodes: Sequence[NodeRecord], region_label: str, region_resource: str | None
) -> list[Fit]:
    """How each island fits, in the order given.

    Islands of one region share its nodes: first each gets its smallest size in the order given, then
    each grows to at most its largest.
    """
    usable = [node for node in nodes if node.usable]
    now = _place(islands, usable, [dict(node.available) for node in usable], region_label, region_resource)
    ever = _place(islands, usable, [dict(node.resources) for node in usable], region_label, region_resource)
    return [
        Fit(
            island.name,
            island.workers.min,
            island.workers.max,
            now[island.name],
            ever[island.name],
            _sentence(island, islands, usable, region_label, region_resource),
        )
        for island in islands
    ]


def choose_node(
    nodes: Sequence[NodeRecord], region_label: str, region: str, needs: Mapping[str, float] | None = None
) -> NodeRecord | None:
    """The node of a region for something that should stay: stable before spot, then the freest.

    None if no usable node of the region has the free resources `needs` (none: any node).
    """
    wanted = needs or {}
    there = [
        node
        for node in nodes
        if node.usable and node.labels.get(region_label) == region and _times(wanted, node.available, 1)
    ]
    return min(
        there, key=lambda node: (node.is_spot, -node.available.get("CPU", 0.0), node.node_id), default=None
    )


def choose_control_node(
    nodes: Sequence[NodeRecord], region_label: str, control_region: str | None, driver_node_id: str
) -> NodeRecord | None:
    """The node of the synchronizer: in the control region, or the driver's own without one.

    None if the region has no usable node.
    """
    if control_region is not None:
        return choose_node(nodes, region_label, control_region)
    return next((node for node in nodes if node.node_id == driver_node_id and node.usable), None)


# ---------------------------------------------------------------------------------------- inside


def _place(
    islands: Sequence[Island],
    nodes: Sequence[NodeRecord],
    free: list[dict[str, float]],
    region_label: str,
    region_resource: str | None,
) -> dict[str, int]:
    """Workers of each island that fit into `free`, which is used up on the way."""
    placed = {island.name: 0 for island in islands}
    for limit in ("min", "max"):
        for island in islands:
            needs = worker_resources(island, region_resource)
            for node, left in zip(nodes, free, strict=True):
                if node.labels.get(region_label) != island.region:
                    continue
                workers = _times(needs, left, getattr(island.workers, limit) - placed[island.name])
                for name, amount in needs.items():
                    left[name] = left.get(name, 0.0) - workers * amount
                placed[island.name] += workers
    return placed


def _times(needs: Mapping[str, float], free: Mapping[str, float], most: int) -> int:
    """How many times `needs` fit into `free`, at most `most`."""
    fits = [int(free.get(name, 0.0) / amount + 1e-9) for name, amount in needs.items()]
    return max(0, min([most, *fits]))


def _sentence(
    island: Island,
    islands: Sequence[Island],
    nodes: Sequence[NodeRecord],
    region_label: str,
    region_resource: str | None,
) -> str:
    workers = island.workers
    count = str(workers.min) if workers.min == workers.max else f"{workers.min} to {workers.max}"
    each = [_amount("CPU", island.cpus_per_worker)]
    if island.gpus_per_worker:
        each.append(_amount("GPU", island.gpus_per_worker))
    wants = f"island {island.name} wants {count} x {' + '.join(each)} with {region_label}={island.region}"

    there = [node for node in nodes if node.labels.get(region_label) == island.region]
    if not there:
        return f"{wants}; no node has that label; the cluster has {_regions(nodes, region_label)}"
    has = " and ".join(_amounts(there, with_gpu=island.gpus_per_worker > 0))
    text = f"{wants}; the cluster has {has} there, on {len(there)} node{'' if len(there) == 1 else 's'}"
    if region_resource is not None:
        resource = region_resource.format(region=island.region)
        without = sum(1 for node in there if node.resources.get(resource, 0.0) < REGION_SHARE)
        if without:
            text += f", {without} of them without the resource {resource}: start these with "
            text += f"--resources '{{\"{resource}\": 1}}'"
    sharing = [other.name for other in islands if other.region == island.region and other is not island]
    if sharing:
        text += f", shared with island {', '.join(sharing)}"
    others = [node for node in nodes if node.labels.get(region_label) != island.region]
    return f"{text}; elsewhere it has {_regions(others, region_label)}" if others else text


def _regions(nodes: Sequence[NodeRecord], region_label: str) -> str:
    """The regions present, with their CPUs and GPUs."""
    if not nodes:
        return "no usable node"
    parts = []
    for region in sorted({node.labels.get(region_label, "") for node in nodes}):
        there = [node for node in nodes if node.labels.get(region_label, "") == region]
        name = f"{region_label}={region}" if region else f"no {region_label}"
        parts.append(f"{name} ({', '.join(_amounts(there))})")
    return ", ".join(parts)


def _amounts(nodes: Sequence[NodeRecord], *, with_gpu: bool = False) -> list[str]:
    """CPUs of these nodes, and GPUs if there are any or `with_gpu`."""
    cpus, gpus = (sum(node.resources.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    return [_amount("CPU", cpus), *([_amount("GPU", gpus)] if gpus or with_gpu else [])]


def _amount(kind: str, amount: float) -> str:
    return f"{amount:g} {kind}{'' if amount == 1 else 's'}"
