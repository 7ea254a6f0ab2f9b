"""Whatever a configuration file contains, the answer is a job or a list of mistakes with places."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.base.config import Fleet, Job
from elastic.base.configfile import load_fleet, load_job
from elastic.base.errors import ConfigError
from elastic.base.schema import keys_of

pytestmark = pytest.mark.unit

KEYS = sorted({key.rsplit(".", 1)[-1] for model in (Job, Fleet) for key in keys_of(model)})
scalars = st.sampled_from(
    [
        None,
        True,
        3,
        -1,
        0,
        2.5,
        float("inf"),
        "x",
        "3e-4",
        "decoder",
        "hf",
        "bytes",
        "diloco",
        "synchronous",
        "",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, "zz"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


PLACE = re.compile(r"^(f\.yaml:\d+:\d+|override '.*'): .+", re.S)


texts = st.text("abz:{}[]&*#!|>'\"%@`,-? \n\t~0.e", max_size=40)
fuzz = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def as_yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")


def assert_loaded_or_refused(text: str, overrides: list[str]) -> None:
    Path("f.yaml").write_text(text, "utf-8")
    for load in (load_job, load_fleet):
        problems = problems_of(load, overrides)
        assert [problem for problem in problems if not PLACE.match(problem)] == []


def problems_of(load: Callable[..., object], overrides: list[str]) -> list[str]:
    try:
        load("f.yaml", overrides)
    except ConfigError as error:
        return error.problems
    return []


@fuzz
@given(
    data=st.dictionaries(st.sampled_from([*Job.model_fields, *Fleet.model_fields]), values, max_size=6),
    key=st.sampled_from([*keys_of(Job), *keys_of(Fleet), "islands.0.workers", "zz", ""]),
    value=values,
)
def test_any_data_is_loaded_or_refused_with_places(folder: Path, data: dict, key: str, value: object) -> None:
    """No value in the place of another raises anything but ConfigError, and every mistake has its place."""
    assert_loaded_or_refused(as_yaml(data), [f"{key}={as_yaml(value)}"])


@fuzz
@given(text=texts, override=texts)
def test_any_text_is_loaded_or_refused_with_places(folder: Path, text: str, override: str) -> None:
    """Text that is hardly YAML is refused as such."""
    assert_loaded_or_refused(text, [override])
    assert_loaded_or_refused("name: a\nbudget: {tokens: 1}\n" + text, ["name=" + override])
