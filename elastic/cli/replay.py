"""`elastic replay`: a scripted scenario through the real worker and synchronizer code."""

from __future__ import annotations

import json as jsonlib

from elastic.base.errors import EXIT_BUG, ConfigError

TOLERANCE = 1e-6
"""Largest absolute difference from the scenario's own figures that passes."""


def replay_command(path: str, *, check: bool = False) -> None:
    """Print local and published values as JSON; with `check` only whether they are the expected ones."""
    from elastic.runtime.scenario import load_scenario, replay_scenario

    scenario = load_scenario(path)
    if check and "expect" not in scenario:
        raise ConfigError([f"{path}: has no `expect` to check against; leave --check out"])
    replayed = replay_scenario(scenario)
    if not check:
        print(jsonlib.dumps(replayed.to_json()))
        return
    worst = replayed.worst(scenario["expect"])
    verdict = "as expected" if worst <= TOLERANCE else "NOT as expected"
    print(f"{path}: {verdict}; largest difference {worst:.2g}, allowed {TOLERANCE:g}")
    if worst > TOLERANCE:
        raise SystemExit(EXIT_BUG)
