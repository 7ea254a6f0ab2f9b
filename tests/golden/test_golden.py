"""The scripted scenarios of this folder, replayed through our AdamW, merge and outer step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.base.errors import ConfigError
from elastic.runtime.scenario import load_scenario, replay_scenario
from elastic.training.adamw import AdamW
from elastic.training.merge import Encoded, merge
from elastic.training.outer import OuterState, adopt, delta

pytestmark = pytest.mark.unit

ABSOLUTE = 1e-6


def _tensors(flat: dict[str, list[float]], shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    return {name: torch.tensor(values).reshape(shapes[name]) for name, values in flat.items()}


def _assert_close(got: dict[str, Tensor], flat: dict[str, list[float]], where: str) -> None:
    for name, values in flat.items():
        error = (got[name].flatten() - torch.tensor(values)).abs().max().item()
        assert error <= ABSOLUTE, f"{where}: {name} is off by {error}"


@pytest.mark.parametrize("name", ["average", "diloco_tokens"])
def test_a_scripted_run_gives_the_published_numbers(name: str) -> None:
    """Every local value after every inner step, and every published version, is within 1e-6."""
    scenario: dict[str, Any] = json.loads((Path(__file__).parent / f"{name}.json").read_text())
    cfg, shapes = scenario["config"], scenario["shapes"]
    inner, outer = cfg["inner"], cfg["outer"]
    state = OuterState(_tensors(scenario["init"], shapes))
    locals_ = [{key: t.clone() for key, t in state.published.items()} for _ in range(cfg["islands"])]
    bases = [dict(state.published) for _ in locals_]
    optimizers = [
        AdamW(
            local,
            decayed=frozenset(shapes),
            betas=tuple(inner["betas"]),
            eps=inner["eps"],
            weight_decay=inner["weight_decay"],
        )
        for local in locals_
    ]
    for step in range(1, cfg["sync_every"] * cfg["outer_steps"] + 1):
        for island, optimizer in enumerate(optimizers):
            optimizer.step(_tensors(scenario["grads"][island][step - 1], shapes), inner["lr"])
        if step % cfg["sync_every"] == 0:
            tokens = [cfg["sync_every"] * per_step for per_step in cfg["tokens_per_step"]]
            deltas = [delta(base, local) for base, local in zip(bases, locals_, strict=True)]
            encoded = [Encoded("fp32", [{key: (0, rows) for key, rows in each.items()}]) for each in deltas]
            weights = [count / sum(tokens) for count in tokens]
            state.step(merge(encoded, weights, shapes), outer["lr"], outer["momentum"])
            packet = state.publish("fp32")
            for island, local in enumerate(locals_):
                bases[island] = adopt(bases[island], packet, "fp32")
                for key, value in bases[island].items():
                    local[key].copy_(value)
            version = step // cfg["sync_every"]
            expected = scenario["expect"]["published"][version - 1]
            assert (expected["fragment"], expected["version"]) == (0, version)
            _assert_close(state.published, expected["params"], f"version {version}")
        for island, local in enumerate(locals_):
            expected = scenario["expect"]["local"][island][step - 1]
            _assert_close(local, expected, f"island {island}, step {step}")


@pytest.mark.parametrize("name", ["average", "diloco_tokens", "streaming_overlap", "keep_progress"])
def test_the_real_worker_and_synchronizer_give_the_published_numbers(name: str) -> None:
    """`elastic replay`: the whole path, with threads, records and packets, is within 1e-6 as well."""
    scenario = load_scenario(Path(__file__).parent / f"{name}.json")
    assert replay_scenario(scenario).worst(scenario["expect"]) <= ABSOLUTE


def test_few_bits_are_not_the_published_numbers() -> None:
    """The comparison can fail: with int4 deltas the values are others."""
    scenario = load_scenario(Path(__file__).parent / "streaming_overlap.json")
    scenario["config"] |= {"codec_up": "int4", "codec_down": "int4"}
    assert replay_scenario(scenario).worst(scenario["expect"]) > 100 * ABSOLUTE


def test_what_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    """An unknown key of config, a file that is no scenario, a file that is not there."""
    scenario = json.loads((Path(__file__).parent / "average.json").read_text())
    scenario["config"]["quorums"] = 1
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(scenario))
    with pytest.raises(ConfigError, match="config has quorums; what can be replayed: alpha, "):
        load_scenario(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="not a scenario"):
        load_scenario(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_scenario(tmp_path / "none.json")
