"""The scripted scenarios of this folder, replayed through our AdamW, merge and outer step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.training.adamw import AdamW
from elastic.training.outer import OuterState, adopt, delta, merge

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
            state.step(merge(deltas, tokens), outer["lr"], outer["momentum"])
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
