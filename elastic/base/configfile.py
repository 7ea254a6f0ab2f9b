"""Reads a job or a fleet: YAML, then `key=value` overrides, then checks, then derived values.

Precedence: an override beats the file, the file beats the default; nothing else is looked at, above all
no environment variable. All mistakes come at once, in one ConfigError, each as `file:line:col: message`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from elastic.base import schema
from elastic.base.checks import check_section, check_together
from elastic.base.config import Fleet, Job
from elastic.base.errors import ConfigError
from elastic.base.hints import did_you_mean, nearest
from elastic.base.overrides import apply_overrides, split_overrides
from elastic.base.resolve import Given, Resolved, Source, dotted, resolve_fleet, resolve_job
from elastic.base.schema import Path
from elastic.base.yamlfile import Problem, Tree, read_tree

Model = TypeVar("Model", Job, Fleet)
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def load_job(path: str | FilePath, overrides: Sequence[str] = ()) -> Resolved[Job]:
    """The job in a YAML file, with overrides such as `inner.lr=3e-4`. Raises ConfigError."""
    job, given = _load(Job, path, overrides)
    return resolve_job(job, given)


def load_fleet(path: str | FilePath, overrides: Sequence[str] = ()) -> Resolved[Fleet]:
    """The fleet in a YAML file, with overrides such as `islands.us.workers=2`. Raises ConfigError."""
    fleet, given = _load(Fleet, path, overrides)
    return resolve_fleet(fleet, given)


def load_both(
    job: str | FilePath, fleet: str | FilePath, overrides: Sequence[str] = ()
) -> tuple[Resolved[Job], Resolved[Fleet]]:
    """A job and a fleet that fit together; overrides of the fleet begin with `fleet.`. Raises ConfigError."""
    of_job, of_fleet = split_overrides(overrides)
    problems: list[str] = []
    loaded: list[Any] = []
    for load, path, own in ((load_job, job, of_job), (load_fleet, fleet, of_fleet)):
        try:
            loaded.append(load(path, own))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    check_together(*loaded)
    return loaded[0], loaded[1]


def _load(model: type[Model], path: str | FilePath, overrides: Sequence[str]) -> tuple[Model, Given]:
    problems: list[Problem] = []
    tree = read_tree(path, problems)
    if tree is None:
        raise ConfigError([str(problem) for problem in problems])
    _complete(model, tree.data)
    apply_overrides(model, tree, overrides, problems)
    _complete(model, tree.data)
    problems += _wrong_types(model, tree)
    value: Model | None = None
    try:
        value = model.model_validate(tree.data)
    except ValidationError as error:
        problems += [_explain(each, model, tree) for each in error.errors(include_url=False)]
    sections = dict(value) if value is not None else _valid_sections(model, tree.data)
    for name, part in sections.items():
        for where, why in check_section(name, part):
            problems.append(Problem(tree.value_place(where), f"{dotted(where)}: {why}"))
    if value is None or problems:
        raise ConfigError([str(problem) for problem in sorted(set(problems))])
    return value, _given(tree)


def _complete(annotation: object, data: object) -> None:
    """Write out the kind that is meant when none is given, and let an empty section be its defaults."""
    here = schema.section(annotation, data)
    if not isinstance(data, dict) or here is None:
        return
    kind = schema.default_kind(annotation)
    if kind is not None:
        data.setdefault("kind", kind)
    for name, field in here.model_fields.items():
        inner = schema.item(field.annotation)
        if name in data and data[name] is None and schema.section(field.annotation, {}) is not None:
            data[name] = {}
        if inner is not None and isinstance(data.get(name), list):
            for each in data[name]:
                _complete(inner, each)
        else:
            _complete(field.annotation, data.get(name))


def _valid_sections(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Those top-level fields that are right although others are not, so that they are checked further."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in data:
            try:
                found[name] = TypeAdapter(field.annotation).validate_python(data[name])
            except ValidationError:
                continue  # explained with the whole
    return found


def _given(tree: Tree) -> Given:
    """Where each value came from; a short form such as `workers: 2` gives every key below it."""

    def given(path: Path) -> tuple[Source, str] | None:
        for end in range(len(path), 0, -1):
            place = tree.values.get(path[:end])
            if place is not None:
                if end < len(path) and isinstance(_at(tree.data, path[:end]), dict):
                    return None  # the section is there, this key of it is not
                return ("file" if place.override is None else "override"), str(place)
        return None

    return given


def _at(data: object, path: Path) -> object:
    for key in path:
        data = schema.child(data, key)
    return data


# ------------------------------------------------------------------------------------ in plain words


def _wrong_types(model: type[BaseModel], tree: Tree) -> Iterator[Problem]:
    """Values that pydantic would convert without a word, as the text '1e-4' for a number."""
    for path in tree.values:
        value, annotation = _at(tree.data, path), schema.annotation_at(model, tree.data, path)
        plain = not isinstance(value, dict | list) and value is not None
        if plain and annotation is not None and schema.needs_conversion(value, annotation):
            yield Problem(tree.value_place(path), _expected(model, tree, path, value))


def _explain(error: ErrorDetails, model: type[BaseModel], tree: Tree) -> Problem:
    path = schema.plain_path(model, tree.data, error["loc"])
    key, value = dotted(path), error["input"]
    if error["type"] == "missing":
        field = schema.section(schema.annotation_at(model, tree.data, path[:-1]), _at(tree.data, path[:-1]))
        text = (field.model_fields[str(path[-1])].description or "") if field else ""
        return Problem(tree.key_place(path), f"missing key '{key}': {text}")
    if error["type"] == "extra_forbidden":
        above = path[:-1]
        here = schema.section(schema.annotation_at(model, tree.data, above), _at(tree.data, above))
        inside = f" in {dotted(above)}" if above else ""
        hint = did_you_mean(str(path[-1]), here, model)
        return Problem(tree.key_place(path), f"unknown key '{path[-1]}'{inside}; {hint}")
    if error["type"] == "union_tag_invalid":
        kinds = list(schema.variants(schema.annotation_at(model, tree.data, path)))
        kind = str(value.get("kind") if isinstance(value, Mapping) else value)
        near = nearest(kind, kinds)
        hint = f"; did you mean '{near}'?" if near else ""
        where = tree.value_place((*path, "kind"))
        return Problem(where, f"{key}.kind: unknown kind '{kind}', one of {', '.join(kinds)}{hint}")
    if error["type"] == "mistake":
        context = error.get("ctx", {})
        where = (*path, context["field"]) if context.get("field") else path
        return Problem(tree.value_place(where), f"{dotted(where)}: {context['why']}")
    return Problem(tree.value_place(path), _expected(model, tree, path, value))


def _expected(model: type[BaseModel], tree: Tree, path: Path, value: object) -> str:
    """What should stand there, what does, and the likely way out."""
    annotation = schema.annotation_at(model, tree.data, path)
    expected = schema.words(annotation)
    saw = f"'{value}'" if isinstance(value, str) else schema.value_text(value)
    saw = saw if len(saw) <= 60 else saw[:57] + "..."
    hint = ""
    if isinstance(value, str) and expected.startswith("one of "):
        near = nearest(value, expected.removeprefix("one of ").split(", "))
        hint = f"; did you mean '{near}'?" if near else ""
    elif isinstance(value, str) and _is_number(value) and "number" in expected:
        hint = "; take off the quotes"
    elif isinstance(value, str) and expected == "true or false" and value.lower() in _SWITCHES:
        hint = f"; write {_SWITCHES[value.lower()]}"
    elif isinstance(value, bool | int | float) and expected.startswith("text"):
        hint = "; put it in quotes"
    elif expected.startswith("list of ") and not isinstance(value, list | dict):
        hint = f"; write [{value}]"
    return f"{dotted(path)}: expected {expected} (saw: {saw}){hint}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
