"""The script of this folder gives the given scenarios, its files are what it gives, and they keep the rules.

The rules are checked from the recorded values alone: deltas are differences of what `expect` holds, their
weights are written out by hand below, and one AdamW per island tells what it held before each adoption.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from fractions import Fraction as F
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.unit

HERE = Path(__file__).parent
ABSOLUTE = 1e-6
GIVEN = ["average", "diloco_tokens", "streaming_overlap"]
Weights = dict[tuple[int, int], F]
"""(island, the island's how-manieth due of the fragment) -> share of its delta in the outer step."""

WEIGHTS: dict[str, list[list[Weights]]] = {
    # tokens 4, 2, 1 a step; 3 steps to the first snapshot, then 4; g(1) = 2/3
    "quorum": [
        [
            {(0, 1): F(12, 18) * F(18, 27), (1, 1): F(6, 18) * F(18, 27)},  # missing: the mean, 9
            {(0, 2): F(16, 31), (1, 2): F(8, 31), (2, 1): F(3, 31) * F(2, 3), (2, 2): F(4, 31)},
            {(0, 3): F(16, 20) * F(20, 28), (2, 3): F(4, 20) * F(20, 28)},  # missing: its last, 8
            {(0, 4): F(16, 36), (1, 3): F(8, 36) * F(2, 3), (1, 4): F(8, 36), (2, 4): F(4, 36)},
            {(0, 5): F(16, 28), (1, 5): F(8, 28), (2, 5): F(4, 28)},
        ]
    ],
    # uniform, full; g(1) = 4/5, g(2) = 2/3; (1, 2) of fragment 1 comes three versions late and is refused
    "staleness": [
        [
            {(0, 1): F(1)},
            {(0, 2): F(1, 2), (1, 2): F(1, 2)},
            {(0, 3): F(1, 3), (1, 1): F(1, 3) * F(2, 3), (1, 3): F(1, 3)},
            {(0, 4): F(1)},
            {(0, 5): F(1, 3), (1, 4): F(1, 3) * F(4, 5), (1, 5): F(1, 3)},
        ],
        [
            {(0, 1): F(1, 2), (1, 1): F(1, 2)},
            {(0, 2): F(1)},
            *({(0, due): F(1, 2), (1, due): F(1, 2)} for due in (3, 4, 5)),
        ],
    ],
    # the first snapshot of either fragment falls on step 0
    "eager": [[{}, *({(0, due): F(3, 4), (1, due): F(1, 4)} for due in (2, 3, 4, 5))]] * 2,
    "keep_progress": [[{(0, due): F(1, 2), (1, due): F(1, 2)} for due in (1, 2, 3)]] * 2,
    # tokens * tokens / steps: 4, 16, 1 a step
    "leaver": [
        [
            {(0, 1): F(4, 21), (1, 1): F(16, 21), (2, 1): F(1, 21)},
            *({(0, due): F(4, 5), (2, due): F(1, 5)} for due in (2, 3)),
        ]
    ]
    * 2,
    # tokens 1, 2, 1 a step, six steps a period; the joiner has done none for version 2 of fragment 1
    "joiner": [
        [
            {},
            {(0, 2): F(1, 3), (1, 2): F(2, 3)},
            {(0, 3): F(6, 21), (1, 3): F(12, 21), (2, 1): F(3, 21)},
            {(0, 4): F(6, 24), (1, 4): F(12, 24), (2, 2): F(6, 24)},
        ],
        [
            {(0, 1): F(1, 3), (1, 1): F(2, 3)},
            {(0, 2): F(1, 3), (1, 2): F(2, 3)},
            *(
                {(0, due): F(6, 24), (1, due): F(12, 24), (2, due - 1): F(6, 24)}
                for due in (3, 4)
            ),
        ],
    ],
}  # fmt: skip
OURS = sorted(WEIGHTS)


@pytest.fixture(scope="module")
def derive() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("golden_derive", HERE / "derive.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["golden_derive"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _read(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text("utf-8"))


def _assert_same(got: Any, expect: dict[str, Any]) -> None:
    for island, (ours, theirs) in enumerate(zip(got["local"], expect["local"], strict=True)):
        for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
            _assert_close(mine, other, f"island {island}, step {step}")
    for mine, other in zip(got["published"], expect["published"], strict=True):
        assert (mine["fragment"], mine["version"]) == (other["fragment"], other["version"])
        _assert_close(mine["params"], other["params"], f"version {mine['version']}")


def _assert_close(mine: Any, other: Any, where: str) -> None:
    if other is None:
        assert mine is None, where
        return
    assert mine.keys() == other.keys(), where
    for name, values in other.items():
        assert mine[name] == pytest.approx(values, abs=ABSOLUTE, rel=0), f"{where}: {name}"


def _flat(row: dict[str, list[float]] | None, names: list[str]) -> Tensor:
    assert row is not None
    return torch.tensor([value for name in names for value in row[name]], dtype=torch.float64)


class Recorded:
    """What one fragment of a scenario's `expect` shows, in fp64."""

    def __init__(self, scenario: dict[str, Any], p: int) -> None:
        self.scenario, self.cfg, self.p = scenario, scenario["config"], p
        count = self.cfg["fragments"]
        self.names = [n for n in scenario["shapes"] if count == 1 or n.startswith(f"layers.{p}.")]
        rows = [each for each in scenario["expect"]["published"] if each["fragment"] == p]
        assert [each["version"] for each in rows] == list(range(1, len(rows) + 1))
        self.published = [
            _flat(each, self.names) for each in (scenario["init"], *(r["params"] for r in rows))
        ]
        """By version."""
        self.before = [self._before(island) for island in range(self.cfg["islands"])]
        """By island and step (from 1): values after the inner step, before any adoption."""

    def due(self, version: int) -> int:
        """The step at which a version falls due."""
        period, count = self.cfg["sync_every"], self.cfg["fragments"]
        return (version - 1) * period + (self.p + 1) * period // count

    def local(self, island: int, step: int) -> Tensor:
        """Values after a step and any adoption; step 0: the start."""
        row = self.scenario["expect"]["local"][island][step - 1] if step else self.scenario["init"]
        return _flat(row, self.names)

    def first_version(self, island: int) -> int:
        """The version that the island's first due leads to."""
        for join in self.scenario.get("joins", []):
            if join["island"] == island:
                entered = Recorded(self.scenario, join["at_version"]["fragment"])
                step = entered.due(join["at_version"]["version"])
                return next(v for v in range(1, len(self.published)) if self.due(v) > step)
        return 1

    def delta(self, island: int, due: int) -> Tensor:
        """What the island hands in for its `due`-th due."""
        version = due + self.first_version(island) - 1
        step = self.due(version) - self.cfg["overlap_steps"]
        if self.cfg.get("mix") == "eager":  # from what it held after adopting one version earlier
            start = self.local(island, self.due(version - 2) if version > 2 else 0)
            return start - self.before[island][step]
        return self.published[version - 1] - self.local(island, step)

    def _before(self, island: int) -> dict[int, Tensor]:
        inner, expect = self.cfg["inner"], self.scenario["expect"]["local"][island]
        grads = self.scenario["grads"][island]
        first = next(step for step, each in enumerate(grads) if each)
        entry: dict[str, Any] = dict(self.scenario["init"])
        for each in self.scenario["expect"]["published"]:
            if self._published_at(each) <= first:
                entry.update(each["params"])
        param = _flat(entry, self.names)
        adamw = torch.optim.AdamW([param], **{k: v for k, v in inner.items() if k != "kind"})
        seen: dict[int, Tensor] = {}
        for step, (each, after) in enumerate(zip(grads, expect, strict=True), start=1):
            if each:
                param.grad = _flat(each, self.names)
                adamw.step()
                seen[step] = param.clone()
                param.copy_(_flat(after, self.names))
        return seen

    def _published_at(self, each: dict[str, Any]) -> int:
        period, count = self.cfg["sync_every"], self.cfg["fragments"]
        return (each["version"] - 1) * period + (each["fragment"] + 1) * period // count


CASES = [(name, p) for name in OURS for p in range(len(WEIGHTS[name]))]


@pytest.mark.parametrize("name", GIVEN)
def test_the_given_scenarios_come_out(derive: Any, name: str) -> None:
    """The plain-torch simulator gives the figures of the scenarios that we did not make."""
    scenario = _read(name)
    _assert_same(derive.expected(scenario), scenario["expect"])


def test_the_files_are_what_the_script_gives(derive: Any) -> None:
    """Inputs to the letter, figures within what another machine may round differently."""
    made = {scenario["name"]: scenario for scenario in derive.scenarios()}
    assert sorted(made) == OURS
    for name, scenario in made.items():
        written = _read(name)
        _assert_same(scenario.pop("expect"), written.pop("expect"))
        assert scenario == written


@pytest.mark.parametrize(("name", "p"), CASES)
def test_versions_follow_from_the_deltas_by_hand(name: str, p: int) -> None:
    """m = mu*m + d; theta = theta - lr*(d + mu*m), with d by the weights written out above."""
    seen = Recorded(_read(name), p)
    lr, mu = seen.cfg["outer"]["lr"], seen.cfg["outer"]["momentum"]
    theta = seen.published[0]
    m = torch.zeros_like(theta)
    assert len(WEIGHTS[name][p]) == len(seen.published) - 1
    for version, weights in enumerate(WEIGHTS[name][p], start=1):
        if weights:
            d = sum((float(w) * seen.delta(*who) for who, w in weights.items()), torch.zeros_like(m))
            m = mu * m + d
            theta = theta - lr * (d + mu * m)
        assert (theta - seen.published[version]).abs().max() < ABSOLUTE, f"version {version}"


@pytest.mark.parametrize(("name", "p"), [case for case in CASES if case[0] != "eager"])
def test_versions_are_mixed_with_the_local_values(name: str, p: int) -> None:
    """Blend, but keep-progress where that is the rule or the version lacks the island's contribution."""
    scenario = _read(name)
    seen = Recorded(scenario, p)
    cfg = seen.cfg
    late = {(each["island"], each["due"]) for each in scenario.get("arrivals", []) if each["fragment"] == p}
    adopted = 0
    for island, before in enumerate(seen.before):
        first = seen.first_version(island)
        for version in range(first, len(seen.published)):
            step, new = seen.due(version), seen.published[version]
            if step not in before:
                continue
            if cfg.get("mix") == "keep-progress" or (island, version - first + 1) in late:
                wanted = new + before[step] - seen.local(island, step - cfg["overlap_steps"])
            else:
                wanted = cfg["alpha"] * before[step] + (1 - cfg["alpha"]) * new
            assert (seen.local(island, step) - wanted).abs().max() < ABSOLUTE, f"island {island}, {step}"
            adopted += 1
    assert adopted >= len(seen.published) - 1


@pytest.mark.parametrize(("name", "p"), CASES)
def test_between_adoptions_only_adamw_moves_an_island(name: str, p: int) -> None:
    """Every local value that no adoption touches follows from the one before by torch's AdamW alone."""
    seen = Recorded(_read(name), p)
    dues = {seen.due(version) for version in range(1, len(seen.published))}
    for island, before in enumerate(seen.before):
        for step in before.keys() - dues:
            assert (seen.local(island, step) - before[step]).abs().max() < ABSOLUTE, f"{island}, {step}"


@pytest.mark.parametrize("p", [0, 1])
def test_eager_is_a_step_ahead_with_the_own_share(p: int) -> None:
    """The form that needs no estimate of its own (README): G is the own share of the momentum."""
    seen = Recorded(_read("eager"), p)
    lr, mu = seen.cfg["outer"]["lr"], seen.cfg["outer"]["momentum"]
    for island, w in enumerate((0.75, 0.25)):
        share = torch.zeros_like(seen.published[0])
        start = seen.published[0]
        for version in range(1, len(seen.published)):
            step, new = seen.due(version), seen.published[version]
            fresh = start - seen.before[island][step]
            if version == 1:  # holds nothing of the island's
                wanted = new - fresh
            else:
                share = mu * share + w * seen.delta(island, version)
                g = w * fresh
                wanted = new - lr * (g + mu * (mu * share + g))
            start = seen.local(island, step)
            assert (start - wanted).abs().max() < ABSOLUTE, f"island {island}, version {version}"


def test_eager_with_one_island_is_diloco(derive: Any) -> None:
    """Its share is all there is and never late: the outer steps are those without any overlap."""
    scenario = _read("eager")
    inner = {**scenario["config"]["inner"], "weight_decay": 0.0}  # steps do not depend on the values
    fleet = {"islands": 1, "fragments": 1, "tokens_per_step": [2], "outer_steps": 5}
    config = {**scenario["config"], **fleet, "inner": inner}
    scenario.update(config=config, grads=scenario["grads"][:1])
    eager = derive.expected(scenario)["local"][0]
    scenario["config"] = {**config, "mix": "blend", "overlap_steps": 0}
    diloco = derive.expected(scenario)["local"][0]
    for step in (12, 18, 24, 30):  # at 6 it goes on undisturbed
        _assert_close(eager[step - 1], diloco[step - 1], f"step {step}")


def test_islands_that_are_not_there_have_no_values() -> None:
    """Before it joins and after it leaves, an island's values are null."""
    joiner, leaver = _read("joiner"), _read("leaver")
    assert [row is None for row in joiner["expect"]["local"][2]] == [True] * 9 + [False] * 15
    assert [row is None for row in leaver["expect"]["local"][1]] == [False] * 9 + [True] * 15
    for scenario in (joiner, leaver):
        for grads, local in zip(scenario["grads"], scenario["expect"]["local"], strict=True):
            assert [row is None for row in grads] == [row is None for row in local]
