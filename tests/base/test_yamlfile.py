"""The YAML reader: plain data with places, every mistake of the file itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.base.yamlfile import Problem, Tree, parse_value, read_tree

pytestmark = pytest.mark.unit


def read(tmp_path: Path, text: str) -> tuple[Tree | None, list[str]]:
    path = tmp_path / "f.yaml"
    path.write_text(text, "utf-8")
    problems: list[Problem] = []
    tree = read_tree(path, problems)
    return tree, [str(problem).removeprefix(f"{tmp_path}/") for problem in problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("1_000.5", 1000.5),
        ("6_000_000", 6_000_000),
        ("0x10", 16),
        ("-3", -3),
        ("010", "010"),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("2026-11-30", "2026-11-30"),
        ("1.2.3", "1.2.3"),
        ("'3e-4'", "3e-4"),
        ("e5", "e5"),
        ("[1, a, 2.0]", [1, "a", 2.0]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("s3://bucket/a", "s3://bucket/a"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """Numbers in any usual form are numbers; `no`, dates and leading zeros stay text."""
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_infinity_and_nan_are_read_as_such() -> None:
    """They are numbers to YAML; refusing them is the business of the field."""
    assert parse_value(".inf") == float("inf")
    assert parse_value("-.inf") == float("-inf")
    assert parse_value(".nan") != parse_value(".nan")


def test_places_of_keys_and_values(tmp_path: Path) -> None:
    """Lines and columns count from 1, for keys, values and list items."""
    tree, problems = read(tmp_path, "a: 1\nb:\n  c: [x, y]\n")
    assert tree is not None
    assert problems == []
    assert tree.data == {"a": 1, "b": {"c": ["x", "y"]}}
    assert str(tree.keys[("b", "c")]).endswith("f.yaml:3:3")
    assert str(tree.values[("b", "c", 1)]).endswith("f.yaml:3:10")
    assert tree.value_place(("b", "missing")) == tree.keys[("b",)]


def test_all_duplicate_keys_are_named(tmp_path: Path) -> None:
    """A key given twice is a problem at its second place, in every section."""
    _, problems = read(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 2\n")
    assert problems == [
        "f.yaml:4:3: key 'c' is given twice; first on line 3",
        "f.yaml:5:1: key 'a' is given twice; first on line 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml:1:1: the file is empty"),
        ("# only a comment\n", "f.yaml:1:1: the file is empty"),
        ("- a\n- b\n", "f.yaml:1:1: expected keys and values"),
        ("just text", "f.yaml:1:1: expected keys and values"),
        ("a: 1\nb: [1, 2\n", "f.yaml:3:1: not YAML:"),
        ("a:\n\tb: 1\n", "f.yaml:2:1: not YAML: a tab cannot indent"),
        ("a: *nope\n", "f.yaml:1:4: not YAML:"),
        ("a: @home\n", "f.yaml:1:4: not YAML:"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: not YAML:"),
        ("a: \x07\n", "f.yaml:1:1: not YAML:"),
        ("a: &x [*x]\n", "f.yaml:1:4: an anchor that contains itself"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "f.yaml:3:3: merge keys"),
        ("? [1]\n: 2\n", "f.yaml:1:3: a key must be plain text"),
        ("a: !!int x\n", "f.yaml:1:4: cannot read 'x'"),
        ("a: !python/object:os.system x\n", "f.yaml:1:4: cannot read 'x' with the tag"),
    ],
)
def test_mistakes_of_the_file_have_a_place(tmp_path: Path, text: str, message: str) -> None:
    """Whatever is wrong with the file as YAML is told with line and column, and never raises."""
    _, problems = read(tmp_path, text)
    assert problems[0].startswith(message)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    """No file, a folder, and bytes that are no text are problems, not tracebacks."""
    problems: list[Problem] = []
    assert read_tree("nowhere.yaml", problems) is None
    assert read_tree(tmp_path, problems) is None
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert read_tree(tmp_path / "latin.yaml", problems) is None
    messages = [problem.message for problem in problems]
    assert messages[0] == f"no such file (looked in {Path.cwd()})"
    assert messages[1].startswith("cannot read the file")
    assert messages[2] == "cannot read the file: it is not UTF-8 text"


def test_a_value_that_is_not_yaml_says_why() -> None:
    """The value of an override fails with YAML's reason and a way out."""
    with pytest.raises(ValueError, match="not YAML"):
        parse_value("[1, 2")
    with pytest.raises(ValueError, match="put text that begins with a sign in quotes"):
        parse_value("*.txt")
    with pytest.raises(ValueError, match="given twice"):
        parse_value("{a: 1, a: 2}")
