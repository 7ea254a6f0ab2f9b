"""Facts about the models that messages and reference pages are made of."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from elastic.base.config import Data, Fleet, Job
from elastic.base.hints import ELSEWHERE_CALLED, did_you_mean, nearest
from elastic.base.schema import (
    annotation_at,
    default_kind,
    describe,
    keys_of,
    needs_conversion,
    plain_path,
    section,
    variants,
    words,
)

pytestmark = pytest.mark.unit
MODEL = Job.model_fields["model"].annotation


def test_unions_are_told_apart_by_kind() -> None:
    """The variants of a union, the one meant without `kind`, and the one that data asks for."""
    assert list(variants(MODEL)) == ["decoder", "hf", "python"]
    assert default_kind(MODEL) == "decoder"
    assert section(MODEL, {"kind": "hf"}) is variants(MODEL)["hf"]
    assert section(MODEL, {}) is variants(MODEL)["decoder"]
    assert section(MODEL, {"kind": "nope"}) is None
    assert section(MODEL, {"kind": 3}) is None
    assert variants(int) == {}


@pytest.mark.parametrize(
    ("data", "loc", "path"),
    [
        ({"model": {"kind": "hf"}}, ("model", "hf", "path"), ("model", "path")),
        (
            {"data": {"tokenizer": {"kind": "bytes"}}},
            ("data", "tokenizer", "bytes", "x"),
            ("data", "tokenizer", "x"),
        ),
        ({"inner": {"betas": [1, 2]}}, ("inner", "betas", 1), ("inner", "betas", 1)),
        ({}, ("budget",), ("budget",)),
    ],
)
def test_error_locations_lose_the_tags_of_unions(data: dict, loc: tuple, path: tuple) -> None:
    """Positions are looked up by the path that the user wrote."""
    assert plain_path(Job, data, loc) == path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("inner", "lr"), "number > 0"),
        (("inner", "betas", 0), "number >= 0 and <= 1"),
        (("data", "sources"), "list of text (at least 1)"),
        (("data", "sources", 3), "text"),
        (("logging", "tensorboard"), "true or false"),
        (("outer", "preset"), "one of average, diloco, streaming, decoupled, synchronous"),
        (("model",), "section of kind decoder, hf, python"),
        (("budget", "tokens"), "whole number > 0"),
        (("outer",), "section"),
    ],
)
def test_types_in_words(path: tuple, expected: str) -> None:
    """Annotations read as a person would say them, with bounds wherever pydantic keeps them."""
    assert words(annotation_at(Job, {}, path)) == expected


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1", int, True),
        ("x", str | None, False),
        (True, int, True),
        (1, bool, True),
        (1, str, True),
        (1, float, False),
        (1.0, int, False),
        (["1"], list[str], False),
        ([1], list[str], True),
        ({"a": 1}, dict[str, str], True),
        ("x", BaseModel, False),
        (None, int, False),
    ],
)
def test_silent_conversions_are_seen(value: object, annotation: object, expected: bool) -> None:
    """Text for a number, a boolean for a count, a number for text: all are mistakes."""
    assert needs_conversion(value, annotation) is expected


@pytest.mark.parametrize("model", [Job, Fleet])
def test_every_field_is_documented(model: type[BaseModel]) -> None:
    """Each key has a type in words and a full sentence, for the reference page and the JSON Schema."""
    for field in describe(model):
        assert field.text.endswith("."), field.key
        assert field.type, field.key
        assert "any value" not in field.type, field.key


def test_keys_of_all_variants_and_items_are_known() -> None:
    """Hints can name a key of any kind of section."""
    assert {"model.d_model", "model.path", "model.entry", "data.tokenizer.pattern"} <= set(keys_of(Job))
    assert {"islands.workers.max", "cluster.address"} <= set(keys_of(Fleet))


def test_hints_only_lead_to_names_that_exist() -> None:
    """Every name that another trainer's is translated to is a key of ours."""
    names = {key.rsplit(".", 1)[-1] for model in (Job, Fleet) for key in keys_of(model)}
    assert set(ELSEWHERE_CALLED.values()) <= names
    assert not set(ELSEWHERE_CALLED) & names


def test_nearest_is_silent_when_nothing_is_near() -> None:
    """No hint is better than a wild one."""
    assert nearest("zzz", ["lr", "eps"]) is None
    assert nearest("Betas", ["betas", "eps"]) == "betas"
    assert did_you_mean("zzz", Data, Job).startswith("valid here: sources, ")


def test_json_schemas_describe_every_field() -> None:
    """Editors show the same sentences; short forms of workers are part of the schema."""
    schema = Fleet.model_json_schema()
    assert schema["properties"]["islands"]["description"] == Fleet.model_fields["islands"].description
    assert [option.get("type") for option in schema["$defs"]["Workers"]["anyOf"]] == [
        "object",
        "integer",
        "array",
    ]
