"""`key=value` overrides: found in the models, read like YAML, laid over a file's data with their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from elastic.base import schema
from elastic.base.config import Fleet, Job
from elastic.base.hints import did_you_mean
from elastic.base.yamlfile import Place, Problem, Tree, parse_value

FLEET = "fleet."


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides of the job, and those of the fleet, which begin with `fleet.`."""
    job = [each for each in overrides if not each.startswith(FLEET)]
    return job, [each for each in overrides if each.startswith(FLEET)]


def apply_overrides(
    model: type[BaseModel], tree: Tree, overrides: Sequence[str], problems: list[Problem]
) -> None:
    """Put the values into the tree; keys may begin with `fleet.` for a fleet.

    A wrong override changes nothing and is added to the problems.
    """
    seen: set[str] = set()
    # a section's kind decides which keys it has, and a whole section comes before its parts
    for text in sorted(overrides, key=lambda each: _rank(each.partition("=")[0])):
        place = Place("\U0010ffff", override=text)  # sorts behind every file
        try:
            key, equals, raw = text.partition("=")
            if not equals or not key:
                raise ValueError(f"expected key=value, as in inner.lr=3e-4{_maybe_a_fleet(text)}")
            key = key.removeprefix(FLEET) if model is Fleet else key
            if model is Job and key.split(".")[0] in Fleet.model_fields.keys() - Job.model_fields.keys():
                raise ValueError(f"that is a key of the fleet; write fleet.{text}")
            if key in seen:
                raise ValueError(f"'{key}' is given twice")
            seen.add(key)
            if not raw.strip():
                raise ValueError("no value; write null to go back to the default")
            tree.put(find_key(model, tree.data, key), parse_value(raw), place)
        except ValueError as error:
            problems.append(Problem(place, str(error)))


def find_key(model: type[BaseModel], data: Any, key: str) -> schema.Path:
    """The path that a dotted key names; items of a list by position or by their `name`.

    Raises ValueError with the nearest valid name.
    """
    path: schema.Path = ()
    annotation: object = model
    for name in key.split("."):
        here = schema.section(annotation, {} if data is None else data)
        above = ".".join(str(each) for each in path)
        step: str | int = name
        if schema.item(annotation) is not None:
            step = _item(data, name, above)
        elif here is not None and name not in here.model_fields:
            hint = did_you_mean(name, here, model)
            raise ValueError(f"unknown key '{name}'{f' in {above}' if above else ''}; {hint}")
        elif here is None and not schema.is_free_mapping(annotation):
            raise ValueError(f"'{above}' is a value; there is no '{name}' in it")
        elif data is not None and not isinstance(data, Mapping):  # as the short form `workers: 2`
            raise ValueError(f"'{above}' is {schema.value_text(data)} without keys; override it whole")
        path = (*path, step)
        annotation, data = schema.step(annotation, data, step), schema.child(data, step)
    return path


def _rank(key: str) -> tuple[int, bool]:
    return key.count("."), not key.endswith("kind")


def _item(data: object, name: str, above: str) -> int:
    items = data if isinstance(data, list) else []
    names = [each.get("name") if isinstance(each, Mapping) else None for each in items]
    if name in names:
        return names.index(name)
    if name.isdigit() and int(name) < len(items):
        return int(name)
    there = ", ".join(str(each or i) for i, each in enumerate(names)) or "none"
    raise ValueError(f"'{above}' has no item '{name}'; there are: {there}")


def _maybe_a_fleet(text: str) -> str:
    return "; a fleet is given with --fleet" if text.endswith((".yaml", ".yml")) else ""
