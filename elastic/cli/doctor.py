"""`elastic doctor`: look for what would keep a run from working here, and say how to mend it."""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from elastic.base.config import ExistingCluster, Fleet, Island
from elastic.base.configfile import load_fleet
from elastic.base.errors import EXIT_BUG
from elastic.cli.machine import Check, check_auth, check_devices, machine_checks, ok_or
from elastic.views.format import one_line, plural

CONNECT_DEADLINE_S = 30.0
IMPORT_DEADLINE_S = 120.0
_PACKAGE_PARENT = Path(__file__).parents[2]


def doctor_command(fleet: Path | None, *, json: bool = False) -> None:
    """Print every check; exit code 1 if one has failed."""
    chosen = load_fleet(fleet).value if fleet is not None else None
    checks = all_checks(chosen, os.environ)
    if json:
        answer = {"ok": all(c.status != "fail" for c in checks), "checks": [asdict(c) for c in checks]}
        print(jsonlib.dumps(answer, indent=2))
    else:
        print("\n".join(report_lines(checks)))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(EXIT_BUG)


def report_lines(checks: Sequence[Check]) -> list[str]:
    """One line a check, a second one for its fix, and a verdict."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {one_line(check.saw)}")
        if check.fix:
            lines.append(f"{'':<4}  {'':<{width}}  fix: {check.fix}")
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    return [*lines, ", ".join(f"{count} {status}" for status, count in counts.items())]


def all_checks(fleet: Fleet | None, environment: Mapping[str, str]) -> list[Check]:
    """Checks of this machine, then of torch's devices, then of the cluster if one is meant."""
    islands = fleet.islands if fleet is not None else []
    address = cluster_address(fleet, environment)
    local = islands if address is None else []
    checks = machine_checks(len(local), sum(island.workers.min for island in local))
    answer, problem = probe(["devices"], IMPORT_DEADLINE_S)
    checks.append(check_devices(answer, problem, Path("/dev/nvidiactl").exists()))
    token_file = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    has_token = bool(environment.get("RAY_AUTH_TOKEN")) or token_file.exists()
    checks.append(check_auth(environment.get("RAY_AUTH_MODE"), has_token, address is not None))
    if address is None:
        return checks + ([check_local_cpus(islands, os.cpu_count() or 1)] if islands else [])
    answer, problem = probe(["cluster", address], CONNECT_DEADLINE_S)
    if answer is None:
        fix = "start the cluster, check the address, RAY_ADDRESS and the firewall; versions of Ray must agree"
        return [*checks, Check("ray cluster", "fail", f"{address}: {problem}", fix)]
    nodes = answer["nodes"]
    checks.append(Check("ray cluster", "ok", f"{address}: Ray {answer['ray']}, {plural(len(nodes), 'node')}"))
    return checks + (fleet_checks(fleet, nodes) if fleet is not None else [])


def cluster_address(fleet: Fleet | None, environment: Mapping[str, str]) -> str | None:
    """Address of the cluster that a run here would use, None if it would start one of its own."""
    if fleet is None:
        return environment.get("RAY_ADDRESS") or None
    if not isinstance(fleet.cluster, ExistingCluster):
        return None
    if fleet.cluster.address == "auto":
        return environment.get("RAY_ADDRESS") or "auto"
    return fleet.cluster.address


def probe(arguments: list[str], deadline_s: float) -> tuple[dict[str, Any] | None, str]:
    """Answer of `elastic.runtime.probe` in a process of its own, or None and what went wrong."""
    path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "elastic.runtime.probe", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {deadline_s:g} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode != 0 or not lines:
        return None, one_line(lines[-1]) if lines else f"the probe ended with {done.returncode}"
    return jsonlib.loads(lines[-1]), ""


# ----------------------------------------------------------------------------------------- fleet


def check_local_cpus(islands: Sequence[Island], cpus: int) -> Check:
    """A local fleet shares the CPUs of this machine."""
    wanted = sum(island.workers.min * island.cpus_per_worker for island in islands)
    saw = f"{wanted:g} CPUs for the workers of {plural(len(islands), 'island')}, {cpus} here"
    return ok_or("fleet", wanted <= cpus, saw, "workers will share CPUs and be slow: use fewer")


def fleet_checks(fleet: Fleet, nodes: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Regions by label, and for each island in turn whether its workers fit into what is left."""
    regions: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        regions.setdefault(node["labels"].get(fleet.region_label, "(no label)"), []).append(node)
    saw = ", ".join(f"{region}: {plural(len(found), 'node')}" for region, found in sorted(regions.items()))
    checks = [Check("regions", "ok", saw or "no nodes")]
    left = {node["id"]: dict(node["resources"]) for node in nodes}
    for island in fleet.islands:
        checks.append(_island_check(fleet, island, regions.get(island.region, []), left))
    return checks


def _island_check(
    fleet: Fleet, island: Island, nodes: list[Mapping[str, Any]], left: dict[str, dict[str, float]]
) -> Check:
    name = f"island {island.name}"
    grows = isinstance(fleet.cluster, ExistingCluster) and fleet.cluster.autoscaling
    if not nodes:
        fix = f"start nodes with --labels {fleet.region_label}={island.region}, or correct islands.region"
        return Check(name, "warn" if grows else "fail", f"no node has region {island.region}", fix)
    custom = fleet.region_resource.format(region=island.region) if fleet.region_resource else None
    if custom is not None and not all(node["resources"].get(custom) for node in nodes):
        fix = f"start them with --resources '{{\"{custom}\": 1000}}', or set region_resource: null"
        return Check(name, "fail", f"nodes of region {island.region} lack the resource {custom}", fix)
    needs = {"CPU": island.cpus_per_worker, "GPU": island.gpus_per_worker}
    fits = 0
    for node in nodes:
        free = left[node["id"]]
        while fits < island.workers.max and all(free.get(kind, 0.0) >= n for kind, n in needs.items()):
            fits += 1
            for kind, amount in needs.items():
                free[kind] = free.get(kind, 0.0) - amount
    saw = f"{fits} of {island.workers.min} to {island.workers.max} workers fit in region {island.region}"
    fix = f"a worker needs {needs['CPU']:g} CPU and {needs['GPU']:g} GPU: add nodes, or ask for fewer workers"
    if fits < island.workers.min:
        return Check(name, "warn" if grows else "fail", saw, fix)
    return ok_or(name, fits >= island.workers.max, saw, fix)
