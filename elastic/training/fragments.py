"""Fragments: which parameters are synchronised together.

A fragment is a list of parameter names; every name is in exactly one. `split` looks at names and whole
shapes only, so every rank of every island, and the synchronizer, cut the model the same way. Layers are
the model's blocks (`block_names`); in a model without blocks, and in blocks too few for a balanced
split, every tensor is a layer of its own.

What lies outside the blocks is placed explicitly. `sequential` and `strided`: what is defined before the
first block (the embedding, to which a tied head belongs) goes to the first fragment, what is defined
after the last block (final norm, head) to the last one, anything between two blocks along with the one
before it. `balanced`: each such tensor is a unit of its own.

Patterns: Streaming DiLoCo (arXiv 2501.18512, section 2.2, figure 3) has sequential and strided,
Decoupled DiLoCo (arXiv 2604.21428) balances sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn

from elastic.base.errors import ConfigError
from elastic.base.known import known
from elastic.base.outer_config import Outer
from elastic.training.model import blocks_of
from elastic.training.shard import parameters_of

Pattern = Literal["sequential", "strided", "balanced"]


def split(
    shapes: Mapping[str, Sequence[int]],
    fragments: int,
    pattern: Pattern,
    blocks: Sequence[Sequence[str]] = (),
) -> list[list[str]]:
    """Cut the parameters into `fragments` lists of names, none empty, each in order of definition.

    shapes: whole shapes of the trainable parameters in order of definition, tied ones once. blocks: names
    of each block, in order; empty ones (frozen blocks) are left out. `sequential`: neighbouring layers,
    their numbers differ by at most one; `strided`: layer l in fragment l mod P; `balanced`: whole blocks,
    or single tensors if there are fewer blocks than fragments, each from the largest to the smallest into
    the fragment that is the smallest so far (ties: the first in order).

    Raises ConfigError if there is too little for so many fragments, ValueError if `blocks` names a
    parameter twice or one that `shapes` has not.
    """
    layers = [list(block) for block in blocks if block]
    _check_blocks(shapes, layers)
    if not layers or (pattern == "balanced" and len(layers) < fragments):
        layers = [[name] for name in shapes]
    _check_count(fragments, len(layers), pattern, tensors=len(shapes))
    if pattern == "balanced":
        place = _balanced(shapes, layers, fragments)
    else:
        chosen = [
            number * fragments // len(layers) if pattern == "sequential" else number % fragments
            for number in range(len(layers))
        ]
        place = _along_layers(shapes, layers, chosen, last=fragments - 1)
    parts: list[list[str]] = [[] for _ in range(fragments)]
    for name in shapes:
        parts[place[name]].append(name)
    return parts


def block_names(model: nn.Module) -> list[list[str]]:
    """Names of the trainable parameters of each block (`blocks_of`), sharded or not, in order.

    Blocks that are wholly frozen are left out; [] for a model without blocks.
    """
    names = {parameter: name for name, parameter in parameters_of(model).items()}
    blocks = [[names[p] for p in block.parameters() if p in names] for block in blocks_of(model)]
    return [block for block in blocks if block]


def fragments_of(model: nn.Module, outer: Outer) -> list[list[str]]:
    """The fragments of a model, sharded or not, under a resolved `outer`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters_of(model).items()}
    pattern: Pattern = known(outer.fragment_pattern)
    return split(shapes, known(outer.fragments), pattern, block_names(model))


def _along_layers(
    shapes: Mapping[str, Sequence[int]], layers: list[list[str]], chosen: list[int], last: int
) -> dict[str, int]:
    """The fragment of each name; those outside the layers go by where they are defined."""
    place = {name: fragment for layer, fragment in zip(layers, chosen, strict=True) for name in layer}
    to_come = set(place)
    current = 0
    for name in shapes:
        if name in to_come:
            to_come.remove(name)
            current = place[name]
        else:
            place[name] = current if to_come else last
    return place


def _balanced(shapes: Mapping[str, Sequence[int]], layers: list[list[str]], fragments: int) -> dict[str, int]:
    """The fragment of each name; largest unit first into the smallest fragment."""
    inside = {name for layer in layers for name in layer}
    units = layers + [[name] for name in shapes if name not in inside]
    order = {name: position for position, name in enumerate(shapes)}
    units.sort(key=lambda unit: min(order[name] for name in unit))
    sizes = [sum(math.prod(shapes[name]) for name in unit) for unit in units]
    filled = [(0, 0)] * fragments  # values and units: the count spreads units without values
    place: dict[str, int] = {}
    for number in sorted(range(len(units)), key=lambda number: -sizes[number]):  # stable
        target = filled.index(min(filled))
        values, count = filled[target]
        filled[target] = (values + sizes[number], count + 1)
        place.update(dict.fromkeys(units[number], target))
    return place


def _check_blocks(shapes: Mapping[str, Sequence[int]], layers: list[list[str]]) -> None:
    names = [name for layer in layers for name in layer]
    unknown = sorted(set(names) - set(shapes))
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"blocks must name trainable parameters, each once; unknown: {unknown}")


def _check_count(fragments: int, possible: int, pattern: Pattern, *, tensors: int) -> None:
    if 1 <= fragments <= possible:
        return
    unit = "parameter" if possible == tensors else "block"
    problem = (
        f"outer.fragments: {fragments} asked for, but {possible} {unit}{'s' * (possible != 1)} to train "
        f"can make 1 to {possible} fragments with fragment_pattern {pattern}"
    )
    if possible < fragments <= tensors:
        problem += "; balanced can also part the tensors of a block"
    raise ConfigError([problem])
