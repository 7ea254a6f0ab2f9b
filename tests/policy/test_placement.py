"""Where islands fit, said in numbers and in sentences that name the fix."""

from __future__ import annotations

import pytest

from elastic.base.config import Island
from elastic.policy.placement import NodeRecord, choose_control_node, choose_node, fit, worker_resources

pytestmark = pytest.mark.unit

LABEL, RESOURCE = "ray.io/region", "region_{region}"


def node(name, region="", cpus=2.0, gpus=0.0, free=None, **fields):
    """A node of a region, with its custom resource, all of it free unless said otherwise."""
    resources = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    if region:
        resources[f"region_{region}"] = 1.0
    return NodeRecord(
        node_id=name,
        resources=resources,
        available={**resources, **(free or {})},
        labels={LABEL: region} if region else {},
        **fields,
    )


def island(name, region, workers=1, **fields):
    """An island of a region."""
    return Island(name=name, region=region, workers=workers, **fields)


def test_a_worker_takes_a_sliver_of_its_region():
    """The custom resource binds a worker to its region; without a template the label alone does."""
    gpu = island("us", "us-east", gpus_per_worker=1.0)
    assert worker_resources(gpu, RESOURCE) == {"CPU": 1.0, "GPU": 1.0, "region_us-east": 0.001}
    assert worker_resources(island("us", "us-east"), None) == {"CPU": 1.0}


def test_an_island_that_fits():
    """Up to its largest size, over several nodes, each worker on one of them."""
    (result,) = fit(
        [island("us", "us", [1, 3])], [node("a", "us"), node("b", "us", cpus=1.5)], LABEL, RESOURCE
    )
    assert (result.fits_now, result.fits_ever) == (3, 3)
    assert result.starts_now
    assert result.ever


def test_what_is_busy_fits_later():
    """A busy node counts for ever and not for now."""
    (result,) = fit([island("us", "us")], [node("a", "us", free={"CPU": 0.0})], LABEL, RESOURCE)
    assert (result.fits_now, result.fits_ever, result.starts_now, result.ever) == (0, 1, False, True)


def test_an_island_that_can_never_fit_is_told_why():
    """The sentence has what is wanted, what is there, and what is elsewhere."""
    nodes = [node("a", "eu-west"), node("b", "us-east", cpus=16.0, gpus=2.0)]
    (result,) = fit([island("eu", "eu-west", 8)], nodes, LABEL, RESOURCE)
    assert not result.ever
    assert result.sentence == (
        "island eu wants 8 x 1 CPU with ray.io/region=eu-west; the cluster has 2 CPUs there, on 1 node; "
        "elsewhere it has ray.io/region=us-east (16 CPUs, 2 GPUs)"
    )


def test_a_region_that_does_not_exist_is_named_with_those_that_do():
    """A misspelt region shows the regions of the cluster."""
    (result,) = fit([island("eu", "eu-wst", [2, 4])], [node("a", "eu-west"), node("head")], LABEL, RESOURCE)
    assert result.sentence == (
        "island eu wants 2 to 4 x 1 CPU with ray.io/region=eu-wst; no node has that label; the cluster has "
        "no ray.io/region (2 CPUs), ray.io/region=eu-west (2 CPUs)"
    )
    (result,) = fit([island("eu", "eu")], [], LABEL, RESOURCE)
    assert result.sentence.endswith("no node has that label; the cluster has no usable node")


def test_gpus_that_are_missing_are_counted():
    """A CPU node in the right region does not hold a GPU worker."""
    (result,) = fit([island("us", "us", gpus_per_worker=1.0)], [node("a", "us")], LABEL, RESOURCE)
    assert not result.ever
    assert "wants 1 x 1 CPU + 1 GPU with ray.io/region=us; the cluster has 2 CPUs and 0 GPUs there" in (
        result.sentence
    )


def test_a_label_without_the_resource_names_the_fix():
    """A node that carries the label only is not used, and the sentence gives the flag."""
    bare = NodeRecord(node_id="a", resources={"CPU": 4.0}, available={"CPU": 4.0}, labels={LABEL: "us"})
    (result,) = fit([island("us", "us")], [bare], LABEL, RESOURCE)
    assert not result.ever
    assert "1 of them without the resource region_us: start these with --resources '{\"region_us\": 1}'" in (
        result.sentence
    )
    (result,) = fit([island("us", "us")], [bare], LABEL, None)
    assert result.starts_now


def test_islands_of_one_region_share_it():
    """The smallest sizes go first; nobody is promised the same CPU twice."""
    islands = [island("a", "us", [1, 4]), island("b", "us", 2)]
    first, second = fit(islands, [node("n", "us", cpus=4.0)], LABEL, RESOURCE)
    assert (first.fits_now, second.fits_now) == (2, 2)
    first, second = fit(islands, [node("n", "us", cpus=2.0)], LABEL, RESOURCE)
    assert (first.ever, second.ever) == (True, False)
    assert second.sentence.endswith("on 1 node, shared with island a")


def test_dead_and_draining_nodes_do_not_count():
    """Nothing is placed where it would not stay."""
    nodes = [node("a", "us", alive=False), node("b", "us", draining=True)]
    (result,) = fit([island("us", "us")], nodes, LABEL, RESOURCE)
    assert not result.ever


def test_fractions_of_a_cpu_add_up():
    """Ten workers of a tenth fit on one CPU, whatever floating point says."""
    tenth = island("us", "us", 10, cpus_per_worker=0.1)
    (result,) = fit([tenth], [node("a", "us", cpus=1.0)], LABEL, RESOURCE)
    assert result.starts_now


def test_the_control_node():
    """The driver's own node, or a stable node of the control region, the freest first."""
    spot = NodeRecord(
        node_id="spot",
        available={"CPU": 64.0},
        labels={LABEL: "us", "ray.io/market-type": "spot"},
    )
    nodes = [
        node("head"),
        spot,
        node("b", "us", cpus=8.0),
        node("a", "us", cpus=8.0),
        node("c", "us", cpus=4.0),
    ]
    assert choose_control_node(nodes, LABEL, None, "head") is nodes[0]
    assert choose_control_node(nodes, LABEL, None, "gone") is None
    chosen = choose_control_node(nodes, LABEL, "us", "head")
    assert chosen is not None
    assert chosen.node_id == "a"
    assert choose_control_node([spot], LABEL, "us", "head") is spot
    assert choose_control_node(nodes, LABEL, "eu", "head") is None


def test_a_node_with_room_is_chosen():
    """Needs that only one node can meet decide before anything else."""
    nodes = [node("a", "us", cpus=8.0), node("b", "us", cpus=2.0, gpus=1.0)]
    chosen = choose_node(nodes, LABEL, "us", {"GPU": 1.0})
    assert chosen is not None
    assert chosen.node_id == "b"
    assert choose_node(nodes, LABEL, "us", {"GPU": 2.0}) is None
