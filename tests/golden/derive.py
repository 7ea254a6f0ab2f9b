"""Derive our scenarios with plain `torch.optim`: `python tests/golden/derive.py` rewrites them.

Inner steps by `torch.optim.AdamW`, outer steps by `torch.optim.SGD(nesterov=True)` on parameters whose
`.grad` is the merged delta. Nothing of `elastic` is imported. The format is that of README.md, the rules
those of DESIGN section 4. average, diloco_tokens and streaming_overlap were given; this script reproduces
them, and writes the others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Tensor]
Scenario = dict[str, Any]
FOLDER = Path(__file__).parent
SHAPES = {f"layers.{n}.{kind}": shape for n in (0, 1) for kind, shape in (("weight", [3, 2]), ("bias", [2]))}


@dataclass
class Contribution:
    """What an island hands in for one fragment."""

    island: int
    due: int
    """The island's first, second, ... of this fragment."""
    base_version: int
    delta: Values
    tokens: int
    steps: int
    snapshot: Values
    """Local values when it was taken (with `eager`: right after the adoption at that step)."""


class Outer:
    """theta and m of one fragment, in torch's own optimiser."""

    def __init__(self, values: Values, lr: float, momentum: float) -> None:
        self.params = {name: value.clone() for name, value in values.items()}
        params = list(self.params.values())
        self._sgd = torch.optim.SGD(params, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, d: Values) -> None:
        """One outer step on the merged delta."""
        for name, param in self.params.items():
            param.grad = d[name].clone()
        self._sgd.step()


@dataclass
class Fragment:
    """A fragment at the synchronizer."""

    names: list[str]
    outer: Outer
    version: int = 0
    late: list[tuple[int, Contribution]] = field(default_factory=list)
    """(version that takes it in, contribution)."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Of each island's newest merged contribution."""


class Island:
    """A replica with its own AdamW."""

    def __init__(self, number: int, values: Values, versions: list[int], inner: Mapping[str, Any]) -> None:
        self.number, self.versions = number, versions
        self.local = {name: value.clone() for name, value in values.items()}
        self.base = {name: value.clone() for name, value in values.items()}
        """What the next delta starts from."""
        self.steps = [0] * len(versions)
        """Inner steps since the fragment's last snapshot."""
        self.dues = [0] * len(versions)
        self.under_way: dict[int, Contribution] = {}
        self.estimates: dict[int, Outer] = {}
        self._adamw = torch.optim.AdamW(
            list(self.local.values()),
            lr=inner["lr"],
            betas=tuple(inner["betas"]),
            eps=inner["eps"],
            weight_decay=inner["weight_decay"],
        )

    def train(self, grads: Values) -> None:
        """One inner step."""
        for name, param in self.local.items():
            param.grad = grads[name]
        self._adamw.step()
        self.steps = [steps + 1 for steps in self.steps]


class Simulation:
    """All islands and the synchronizer, step by step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.cfg = scenario, scenario["config"]
        cfg, init = self.cfg, self._tensors(scenario["init"])
        self.mix = cfg.get("mix", "blend")
        self.fragments: list[Fragment] = []
        for p in range(cfg["fragments"]):
            names = [name for name in init if cfg["fragments"] == 1 or name.startswith(f"layers.{p}.")]
            outer = Outer(_only(init, names), cfg["outer"]["lr"], cfg["outer"]["momentum"])
            self.fragments.append(Fragment(names, outer))
        self.merged_in = {
            (late["island"], late["fragment"], late["due"]): late["version"]
            for late in self._said("arrivals")
        }
        joiners = {each["island"] for each in self._said("joins")}
        scripted = [self._said(key) for key in ("arrivals", "leaves", "joins")]
        if self.mix == "eager" and (any(scripted) or cfg["overlap_steps"] != cfg["sync_every"]):
            raise ValueError("the recursion of the paper is that of a fixed set of islands, one period late")
        self.live: dict[int, Island] = {}
        self.published: list[dict[str, Any]] = []
        for number in range(cfg["islands"]):
            if number not in joiners:
                self._enter(number, step=0)

    def run(self) -> dict[str, Any]:
        """What to expect: local values by island and inner step, published versions in order."""
        cfg = self.cfg
        steps = cfg["sync_every"] * cfg["outer_steps"] // cfg["fragments"]
        local: list[list[Any]] = [[] for _ in range(cfg["islands"])]
        for step in range(1, steps + 1):
            there = dict(self.live)
            for number, island in there.items():
                island.train(self._tensors(self.scenario["grads"][number][step - 1]))
            self._exchange(step)
            for number, seen in enumerate(local):
                seen.append(_flat(there[number].local) if number in there else None)
            for leave in self._said("leaves"):
                if leave["after_step"] == step:
                    island = self.live.pop(leave["island"])
                    assert not island.under_way, "leave when nothing is under way"
        return {"local": local, "published": self.published}

    def _exchange(self, step: int) -> None:
        """Whatever falls on this inner step. Adopt before taking snapshots: with tau = H both do."""
        overlap = self.cfg["overlap_steps"]
        if not overlap:
            self._snapshots(step)
        for p in self._due(step):
            self._close(p)
        if overlap:
            self._snapshots(step + overlap)
        for join in self._said("joins"):
            at = join["at_version"]
            if at["fragment"] in self._due(step) and at["version"] == self.fragments[at["fragment"]].version:
                self._enter(join["island"], step)

    def _due(self, step: int) -> list[int]:
        period, count = self.cfg["sync_every"], self.cfg["fragments"]
        return [p for p in range(count) if step > 0 and (step - 1) % period + 1 == (p + 1) * period // count]

    def _snapshots(self, due_step: int) -> None:
        for p in self._due(due_step):
            for island in self.live.values():
                if p not in island.under_way:  # `eager` takes its delta while it adopts
                    self._snapshot(island, p, self._delta(island, p))

    # --------------------------------------------------------------------------------- islands

    def _enter(self, number: int, step: int) -> None:
        """Begin from what is published, and answer for the fragments whose snapshot has passed."""
        values = {name: value for each in self.fragments for name, value in each.outer.params.items()}
        versions = [each.version for each in self.fragments]
        island = self.live[number] = Island(number, values, versions, self.cfg["inner"])
        self.live = dict(sorted(self.live.items()))
        for soon in range(step + 1, step + self.cfg["overlap_steps"] + 1):
            for p in self._due(soon):
                self._snapshot(island, p, self._delta(island, p))

    def _delta(self, island: Island, p: int) -> Values:
        return {name: island.base[name] - island.local[name] for name in self.fragments[p].names}

    def _snapshot(self, island: Island, p: int, delta: Values) -> None:
        island.dues[p] += 1
        steps = island.steps[p]
        island.under_way[p] = Contribution(
            island=island.number,
            due=island.dues[p],
            base_version=island.versions[p],
            delta=delta,
            tokens=steps * self.cfg["tokens_per_step"][island.number],
            steps=steps,
            snapshot={name: island.local[name].clone() for name in self.fragments[p].names},
        )
        island.steps[p] = 0

    def _adopt(self, island: Island, p: int, mine: Contribution, included: bool) -> None:
        """`published` takes the place of the base; local values are mixed with it."""
        alpha = self.cfg.get("alpha", 0.0)
        for name, new in self.fragments[p].outer.params.items():
            now = island.local[name]
            if included and self.mix == "blend":
                now.copy_(alpha * now + (1 - alpha) * new)
            else:
                now.copy_(new + (now - mine.snapshot[name]))
            island.base[name] = new.clone()
        island.versions[p] = self.fragments[p].version

    def _adopt_eagerly(self, island: Island, p: int, mine: Contribution, d: Values) -> None:
        """Each island steps an estimate of its own (arXiv 2502.12996): d with its own share renewed.

            estimate = OuterOpt(estimate, d + w*(fresh - stale))

        Version 1 holds no work yet (its snapshots were taken before the first step), so that the
        progress is kept; what an island has stepped eagerly, or keeps, is sent at the same time.
        """
        cfg, fragment = self.cfg, self.fragments[p]
        share = cfg["tokens_per_step"][island.number] / sum(cfg["tokens_per_step"])
        estimate = island.estimates.get(p) or Outer(
            _only(self._tensors(self.scenario["init"]), fragment.names), **cfg["outer"]
        )
        island.estimates[p] = estimate
        fresh = self._delta(island, p)
        estimate.step({name: d[name] + share * (fresh[name] - mine.delta[name]) for name in fragment.names})
        for name, new in fragment.outer.params.items():
            kept = new + (island.local[name] - mine.snapshot[name])
            island.local[name].copy_(estimate.params[name] if mine.tokens else kept)
            island.base[name] = island.local[name].clone()
        island.versions[p] = fragment.version
        self._snapshot(island, p, fresh)

    # ---------------------------------------------------------------------------- synchronizer

    def _close(self, p: int) -> None:
        """The fragment is due: merge, step, publish; all islands adopt."""
        fragment = self.fragments[p]
        answers = {number: island.under_way.pop(p) for number, island in self.live.items()}
        for number, answer in answers.items():
            version = self.merged_in.get((number, p, answer.due), fragment.version + 1)
            fragment.late.append((version, answer))
        arrived = [each for version, each in fragment.late if version == fragment.version + 1]
        fragment.late = [(version, each) for version, each in fragment.late if version > fragment.version + 1]
        most = self.cfg.get("max_staleness", 0)
        merged = [each for each in arrived if fragment.version - each.base_version <= most]
        merged.sort(key=lambda each: (each.island, each.due))
        if isinstance(quorum := self.cfg.get("quorum", "all"), int):
            assert len({each.island for each in merged}) >= quorum
        d = self._merge(fragment, merged)
        if any(each.steps for each in merged):  # nobody trained: the version rises, nothing moves
            fragment.outer.step(d)
        for each in merged:
            fragment.tokens[each.island] = each.tokens
        fragment.version += 1
        params = _flat(fragment.outer.params)
        self.published.append({"fragment": p, "version": fragment.version, "params": params})
        for number, answer in answers.items():
            if self.mix == "eager":
                self._adopt_eagerly(self.live[number], p, answer, d)
            else:
                included = any(each is answer for each in merged)
                self._adopt(self.live[number], p, answer, included)

    def _merge(self, fragment: Fragment, merged: list[Contribution]) -> Values:
        """The merged delta times the share of the tokens that is there."""
        raw = [self._raw_weight(each) for each in merged]
        discount, total = self.cfg.get("staleness_discount", 0.5), sum(raw)
        d = {name: torch.zeros_like(value) for name, value in fragment.outer.params.items()}
        for weight, each in zip(raw, merged, strict=True):
            fresh = 1 / (1 + discount * (fragment.version - each.base_version))
            for name, value in each.delta.items():
                d[name] += (weight / total * fresh if total else 0.0) * value
        scale = self._scale(fragment, merged)
        return {name: scale * value for name, value in d.items()}

    def _raw_weight(self, each: Contribution) -> float:
        rule = self.cfg.get("weights", "tokens")
        if not each.steps:
            return 0.0
        return {"tokens": each.tokens, "uniform": 1.0, "tokens_rate": each.tokens**2 / each.steps}[rule]

    def _scale(self, fragment: Fragment, merged: list[Contribution]) -> float:
        there, tokens = {each.island for each in merged}, sum(each.tokens for each in merged)
        if self.cfg.get("partial", "share") == "full" or not tokens:
            return 1.0
        usual = tokens / len(there)
        missing = sum(fragment.tokens.get(number, usual) for number in self.live if number not in there)
        return tokens / (tokens + missing)

    # ----------------------------------------------------------------------------------- script

    def _said(self, key: str) -> list[dict[str, Any]]:
        return self.scenario.get(key, [])

    def _tensors(self, flat: Mapping[str, list[float]]) -> Values:
        shapes = self.scenario["shapes"]
        return {name: torch.tensor(values).reshape(shapes[name]) for name, values in flat.items()}


def expected(scenario: Scenario) -> dict[str, Any]:
    """The `expect` of a scenario."""
    return Simulation(scenario).run()


def _only(values: Values, names: Iterable[str]) -> Values:
    return {name: values[name] for name in names}


def _flat(values: Values) -> dict[str, list[float]]:
    # nine digits tell any two fp32 numbers apart
    return {name: [float(f"{x:.9g}") for x in value.flatten().tolist()] for name, value in values.items()}


# ------------------------------------------------------------------------------------ the scenarios


def _input(seed: int, name: str, size: float) -> list[float]:
    """Multiples of size/16 within +-size, exact in fp32, that look like noise: cubes modulo 29."""
    first = 5 * seed + 7 * list(SHAPES).index(name)
    return [size * ((first + k) ** 3 % 29 - 14) / 16 for k in range(math.prod(SHAPES[name]))]


def _scenario(
    name: str,
    config: dict[str, Any],
    *,
    joined: Mapping[int, int] | None = None,
    left: Mapping[int, int] | None = None,
    **happenings: list[dict[str, Any]],
) -> Scenario:
    """Inputs and what to expect; no gradients up to the step `joined`, nor after the step `left`."""
    steps = config["sync_every"] * config["outer_steps"] // config["fragments"]
    begin, end = joined or {}, left or {}
    grads = [
        [
            {param: _input(step + 10 * island, param, 0.5) for param in SHAPES}
            if begin.get(island, 0) < step <= end.get(island, steps)
            else None
            for step in range(1, steps + 1)
        ]
        for island in range(config["islands"])
    ]
    inner = {"kind": "adamw", "lr": 0.0625, "betas": [0.875, 0.9375], "eps": 1e-8, "weight_decay": 0.125}
    scenario = {
        "name": name,
        "config": {**config, "outer": {"lr": 0.75, "momentum": 0.875}, "inner": inner},
        **happenings,
        "shapes": SHAPES,
        "init": {param: _input(1, param, 0.25) for param in SHAPES},
        "grads": grads,
    }
    return {**scenario, "expect": expected(scenario)}


def _config(
    islands: int,
    fragments: int,
    sync_every: int,
    overlap: int,
    outer_steps: int,
    tokens: list[int],
    **more: Any,
) -> dict[str, Any]:
    return {
        "islands": islands,
        "fragments": fragments,
        "sync_every": sync_every,
        "overlap_steps": overlap,
        "tokens_per_step": tokens,
        "outer_steps": outer_steps,
        **more,
    }


def _late(island: int, fragment: int, due: int, version: int) -> dict[str, int]:
    return {"island": island, "fragment": fragment, "due": due, "version": version}


def scenarios() -> list[Scenario]:
    """All scenarios of our own."""

    late_ones = {"quorum": 2, "staleness_discount": 0.5, "max_staleness": 1, "partial": "share"}
    later_ones = {"quorum": 1, "staleness_discount": 0.25, "max_staleness": 2, "partial": "full"}
    return [
        _scenario(
            "quorum",
            _config(3, 1, 4, 1, 5, [4, 2, 1], alpha=0.25, **late_ones),
            arrivals=[_late(2, 0, 1, 2), _late(1, 0, 3, 4)],
        ),
        _scenario(
            "staleness",
            _config(2, 2, 6, 1, 10, [3, 1], alpha=0.5, weights="uniform", **later_ones),
            arrivals=[_late(1, 0, 1, 3), _late(1, 1, 2, 5), _late(1, 0, 4, 5)],
        ),
        _scenario("eager", _config(2, 2, 6, 6, 10, [3, 1], mix="eager")),
        _scenario("keep_progress", _config(2, 2, 8, 3, 6, [1, 1], mix="keep-progress")),
        _scenario(
            "leaver",
            _config(3, 2, 8, 2, 6, [2, 4, 1], alpha=0.5, weights="tokens_rate"),
            left={1: 9},
            leaves=[{"island": 1, "after_step": 9, "farewell": False}],
        ),
        _scenario(
            "joiner",
            _config(3, 2, 6, 3, 8, [1, 2, 1], alpha=0.5),
            joined={2: 9},
            joins=[{"island": 2, "at_version": {"fragment": 0, "version": 2}}],
        ),
    ]


def as_text(scenario: Scenario) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(scenario, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def main() -> None:
    """Write every scenario of our own beside this script."""
    for scenario in scenarios():
        (FOLDER / f"{scenario['name']}.json").write_text(as_text(scenario), "utf-8")


if __name__ == "__main__":
    main()
