"""`elastic doctor`: look for what would keep a run from working here, and say how to mend it."""

from __future__ import annotations

import json as jsonlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from elastic.base.config import ExistingCluster, Fleet, Island
from elastic.base.configfile import load_fleet
from elastic.base.errors import EXIT_BUG
from elastic.cli.machine import Check, check_auth, check_devices, machine_checks, ok_or
from elastic.policy.placement import NodeRecord, fit
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
    nodes = [NodeRecord(**node) for node in answer["nodes"]]
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


def fleet_checks(fleet: Fleet, nodes: Sequence[NodeRecord]) -> list[Check]:
    """Regions by label, and for each island whether its workers fit."""
    label = fleet.region_label
    regions = Counter(node.labels.get(label, "(no label)") for node in nodes if node.usable)
    saw = ", ".join(f"{region}: {plural(count, 'node')}" for region, count in sorted(regions.items()))
    checks = [ok_or("regions", bool(regions), saw or "no usable node", "start nodes", "fail")]
    grows = isinstance(fleet.cluster, ExistingCluster) and fleet.cluster.autoscaling
    for each in fit(fleet.islands, nodes, label, fleet.region_resource):
        name = f"island {each.island}"
        if not each.ever and not grows:
            fix = "add nodes, correct their labels and resources, or ask for fewer or smaller workers"
            checks.append(Check(name, "fail", each.sentence, fix))
        elif not each.starts_now:
            fix = (
                "something else runs there: wait or end it" if each.ever else "the autoscaler must add nodes"
            )
            checks.append(Check(name, "warn", f"{each.fits_now} workers fit now; {each.sentence}", fix))
        else:
            saw = f"{each.fits_now} of {each.workers_min} to {each.workers_max} workers fit now"
            checks.append(Check(name, "ok", saw))
    return checks
