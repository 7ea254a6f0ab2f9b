"""What the configuration models say about themselves: sections, kinds of unions, types in words.

Everything is read from the pydantic models, so that error messages, hints and reference pages can never
disagree with what is accepted. Knows the models' shapes, not their meaning.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class FieldDoc:
    """One line of a reference page. `default` is None where the field must be given."""

    key: str
    type: str
    default: str | None
    text: str


def mistake(why: str, field: str = "") -> PydanticCustomError:
    """An error for a model's own validators to raise; `field` says which of its fields to point at."""
    return PydanticCustomError("mistake", "{why}", {"why": why, "field": field})


# --------------------------------------------------------------------------------------- structure


def variants(annotation: object) -> dict[str, type[BaseModel]]:
    """The models of a union told apart by `kind`, by kind; empty for any other annotation."""
    found: dict[str, type[BaseModel]] = {}
    for option in _options(annotation):
        kind = option.model_fields.get("kind") if _is_model(option) else None
        if kind is None:
            return {}
        found[get_args(kind.annotation)[0]] = option
    return found


def default_kind(annotation: object) -> str | None:
    """The kind that is meant when none is given: that of the variant whose `kind` has a default."""
    for kind, model in variants(annotation).items():
        if not model.model_fields["kind"].is_required():
            return kind
    return None


def section(annotation: object, data: object = None) -> type[BaseModel] | None:
    """The model that `data` is checked against under this annotation; None for a plain value."""
    choices = variants(annotation)
    if choices:
        kind = data.get("kind", default_kind(annotation)) if isinstance(data, Mapping) else None
        return choices.get(kind) if isinstance(kind, str) else None
    return next((option for option in _options(annotation) if _is_model(option)), None)


def item(annotation: object) -> object | None:
    """The annotation of a list's items; None for anything but a list."""
    return next((get_args(option)[0] for option in _options(annotation) if get_origin(option) is list), None)


def is_free_mapping(annotation: object) -> bool:
    """Whether the field is a mapping whose keys are the user's own."""
    return any(get_origin(option) is dict for option in _options(annotation))


def scalars(annotation: object) -> set[type]:
    """The plain types that this annotation can hold, those inside lists, tuples and mappings too."""
    found: set[type] = set()
    for option in _options(annotation):
        origin = get_origin(option)
        if origin is Literal:
            found |= {type(value) for value in get_args(option)}
        elif origin is dict:
            found |= scalars(get_args(option)[1])
        elif origin in (list, tuple):
            found |= {one for inner in get_args(option) for one in scalars(inner)}
        elif option is Any:
            found |= {str, int, float, bool}
        elif isinstance(option, type) and option in (str, int, float, bool):
            found.add(option)
    return found


def needs_conversion(value: object, annotation: object) -> bool:
    """Whether a plain value would have to change its type, as the text '1e-4' for a number.

    pydantic would convert; in a configuration it is a mistake that deserves to be named.
    """
    allowed = scalars(annotation)
    if not allowed:
        return False
    if isinstance(value, Mapping):
        return any(needs_conversion(each, annotation) for each in value.values())
    if isinstance(value, list | tuple):
        return any(needs_conversion(each, annotation) for each in value)
    if isinstance(value, bool):
        return bool not in allowed
    if isinstance(value, str):
        return str not in allowed
    return isinstance(value, int | float) and not allowed & {int, float}


def step(annotation: object, data: object, key: str | int) -> object | None:
    """What may stand one key below `data`: a field's annotation, or that of an item; None if nothing may."""
    if isinstance(key, int):
        inner = item(annotation)
        pair = next((get_args(o) for o in _options(annotation) if get_origin(o) is tuple), ())
        return inner if inner is not None else (pair[key] if key < len(pair) else None)
    here = section(annotation, data)
    field = here.model_fields.get(key) if here else None
    if field is not None:
        # bounds of a field lie beside its annotation; put them back so that words() finds them
        if field.metadata:
            return Annotated[(field.annotation, *field.metadata)]  # pyrefly: ignore[not-a-type]
        return field.annotation
    free = next((get_args(o)[1] for o in _options(annotation) if get_origin(o) is dict), None)
    return free


def child(data: object, key: str | int) -> object:
    """What stands one key below `data`; None if nothing does."""
    if isinstance(data, Mapping):
        return data.get(key)
    if isinstance(data, list) and isinstance(key, int) and -1 < key < len(data):
        return data[key]
    return None


def plain_path(model: type[BaseModel], data: object, loc: Path) -> Path:
    """A pydantic error's location without the tags that pydantic adds for unions and for keys."""
    annotation: object = model
    path: list[str | int] = []
    for position, key in enumerate(loc):
        if isinstance(key, str) and key in variants(annotation) and position:
            annotation = variants(annotation)[key]
        elif key != "[key]":
            path.append(key)
            annotation = step(annotation, data, key)
            data = child(data, key)
    return tuple(path)


def annotation_at(model: type[BaseModel], data: object, path: Path) -> object | None:
    """What may stand at a path: a field's annotation, or that of a list's items; None if nothing may."""
    annotation: object = model
    for key in path:
        annotation, data = step(annotation, data, key), child(data, key)
    return annotation


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a model; those of list items without a position, as `islands.name`."""
    for name, field in model.model_fields.items():
        key = prefix + name
        yield key
        inner = section(item(field.annotation) or field.annotation)
        for option in variants(field.annotation).values() or filter(None, [inner]):
            yield from keys_of(option, key + ".")


# -------------------------------------------------------------------------------------- in words


def describe(model: type[BaseModel], prefix: str = "") -> Iterator[FieldDoc]:
    """Every field below a model, in order, for a reference page."""
    for name, field in model.model_fields.items():
        key = prefix + name
        choices = variants(field.annotation)
        inner = section(item(field.annotation) or field.annotation)
        yield FieldDoc(key, type_text(field), default_text(field), field.description or "")
        for kind, option in choices.items():
            for line in describe(option, key + "."):
                if line.key != f"{key}.kind":
                    yield FieldDoc(f"{line.key} ({kind})", line.type, line.default, line.text)
        if inner is not None and not choices:
            yield from describe(inner, key + "[]." if item(field.annotation) else key + ".")


def type_text(field: FieldInfo) -> str:
    """A field's type in words, with its bounds: `number > 0`, `one of auto, fp32, bf16`."""
    return words(field.annotation, field.metadata)


def words(annotation: object, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation in words."""
    plain: dict[object, str] = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    if variants(annotation):
        return "section of kind " + ", ".join(variants(annotation))
    found: list[str] = []
    for option, own in _options_with_metadata(annotation):
        origin = get_origin(option)
        if origin is Literal:
            text = "one of " + ", ".join(str(value) for value in get_args(option))
        elif origin is list:
            text = f"list of {words(get_args(option)[0])}"
        elif origin is tuple:
            text = "list of two: " + ", ".join(words(each) for each in get_args(option))
        elif origin is dict:
            text = "mapping"
        elif _is_model(option):
            text = "section"
        else:
            text = plain.get(option, "any value")
        bounds = " and ".join(filter(None, (_bound(bound) for bound in (*metadata, *own))))
        found.append(f"{text} {bounds}".strip())
    return " or ".join(found)


def default_text(field: FieldInfo) -> str | None:
    """A field's default as YAML would write it, "" for a section; None where the field must be given."""
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        kind = getattr(value, "kind", None)
        return f"kind {kind}" if kind else ""
    return value_text(value)


def value_text(value: object) -> str:
    """A value as YAML would write it, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(each) for each in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {value_text(each)}" for key, each in value.items()) + "}"
    return str(value)


# -------------------------------------------------------------------------------------- helpers


def _is_model(option: object) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _options_with_metadata(annotation: object) -> list[tuple[Any, tuple[Any, ...]]]:
    """The members of a union with what is annotated to them; None left out. No union: itself alone."""
    metadata: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        for one in extra:
            metadata += tuple(one.metadata) if isinstance(one, FieldInfo) else (one,)
    if get_origin(annotation) in (Union, types.UnionType):
        members = [_options_with_metadata(each) for each in get_args(annotation) if each is not type(None)]
        return [one for member in members for one in member]
    return [(annotation, metadata)]


def _options(annotation: object) -> list[Any]:
    return [option for option, _ in _options_with_metadata(annotation)]


def _bound(bound: object) -> str:
    for name, sign in (("gt", "> "), ("ge", ">= "), ("lt", "< "), ("le", "<= ")):
        limit = getattr(bound, name, None)
        if limit is not None:
            return f"{sign}{limit:g}"
    pattern, longest, shortest = (getattr(bound, n, None) for n in ("pattern", "max_length", "min_length"))
    if pattern is not None:
        return f"matching {pattern}"
    if longest is not None:
        return f"of at most {longest} characters"
    return f"(at least {shortest})" if shortest is not None else ""
