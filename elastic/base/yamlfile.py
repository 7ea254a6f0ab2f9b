"""A YAML file as plain data that remembers where each key and each value stands.

Scalars follow YAML 1.2: `3e-4` is a number, `no` is the text "no", a date is text. Mistakes of the file
itself (bad syntax, a key given twice) are collected, not raised, so that they can be told together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from elastic.base.schema import Path


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file, counted from 1, or a whole override; sorts in reading order."""

    file: str
    line: int = 0
    column: int = 0
    override: str | None = None

    def __str__(self) -> str:
        if self.override is not None:
            return f"override '{self.override}'"
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake and where it is; as text `file:line:col: message`."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass
class Tree:
    """The data of a file with overrides laid over it, and the places of its keys and values by path."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    keys: dict[Path, Place] = field(default_factory=dict)
    values: dict[Path, Place] = field(default_factory=dict)

    def key_place(self, path: Path) -> Place:
        """Where the key stands; for a key that is not there, where its section begins."""
        for end in range(len(path), 0, -1):
            place = self.keys.get(path[:end]) or self.values.get(path[:end])
            if place is not None:
                return place
        return self.values.get((), Place(self.file, 1, 1))

    def value_place(self, path: Path) -> Place:
        """Where the value stands; for a value that is not there, where its section begins."""
        return self.values.get(path) or self.key_place(path)

    def put(self, path: Path, value: object, place: Place) -> None:
        """Set a value from an override, and the sections on the way to it that were not there."""
        for table in (self.keys, self.values):
            for old in [each for each in table if each[: len(path)] == path]:
                del table[old]
        parent: Any = self.data
        for end, key in enumerate(path[:-1], start=1):
            if isinstance(parent, dict) and parent.get(str(key)) is None:
                parent[str(key)] = {}
                self.keys[path[:end]] = self.values[path[:end]] = place
            parent = parent[key]
        parent[path[-1]] = value
        self._mark(path, value, place)

    def _mark(self, path: Path, value: object, place: Place) -> None:
        self.keys[path] = self.values[path] = place
        below = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, each in below:
            self._mark((*path, key), each, place)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def read_tree(path: str | FilePath, problems: list[Problem]) -> Tree | None:
    """The file's data with places; None, and the reason among the problems, if it has no mapping."""
    tree = Tree(str(path))
    start = Place(tree.file, 1, 1)
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        here = "" if FilePath(path).is_absolute() else f" (looked in {FilePath.cwd()})"
        problems.append(Problem(start, f"no such file{here}"))
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(Problem(start, f"cannot read the file: {reason}"))
        return None
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        problems.append(Problem(_place(tree.file, error.problem_mark), _syntax(error)))
        return None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        problems.append(Problem(start, f"not YAML: {str(error).splitlines()[0]}"))
        return None
    if node is None:
        problems.append(Problem(start, "the file is empty"))
        return None
    if not isinstance(node, yaml.MappingNode):
        problems.append(Problem(start, "expected keys and values, as in 'name: my-run'"))
        return None
    tree.data = _build(node, (), tree, problems, ())
    return tree


def parse_value(text: str) -> object:
    """The value of an override, by the same rules as in a file. Raises ValueError with the reason."""
    problems: list[Problem] = []
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_syntax(error)) from None
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {str(error).splitlines()[0]}") from None
    value = _build(node, (), Tree(""), problems, ()) if node is not None else None
    if problems:
        raise ValueError(problems[0].message)
    return value


def _build(node: yaml.Node, path: Path, tree: Tree, problems: list[Problem], above: tuple[int, ...]) -> Any:
    tree.values[path] = _place(tree.file, node.start_mark)
    if id(node) in above:
        problems.append(Problem(tree.values[path], "an anchor that contains itself"))
        return None
    above = (*above, id(node))
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, tree, problems, above)
    if isinstance(node, yaml.SequenceNode):
        return [_build(each, (*path, i), tree, problems, above) for i, each in enumerate(node.value)]
    return _scalar(node, tree.values[path], problems)


def _mapping(
    node: yaml.MappingNode, path: Path, tree: Tree, problems: list[Problem], above: tuple[int, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = _place(tree.file, key_node.start_mark)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(place, "a key must be plain text"))
            continue
        key = key_node.value
        if key == "<<":
            problems.append(Problem(place, "merge keys (<<) are not read; write the keys out"))
        elif key in found:
            before = tree.keys[(*path, key)]
            problems.append(Problem(place, f"key '{key}' is given twice; first on line {before.line}"))
        else:
            tree.keys[(*path, key)] = place
            found[key] = _build(value_node, (*path, key), tree, problems, above)
    return found


def _scalar(node: yaml.Node, place: Place, problems: list[Problem]) -> object:
    kind = node.tag.rsplit(":", 1)[-1]
    text = str(node.value)
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            return int(text.replace("_", ""), 16 if "0x" in text else 10)
        if kind == "float":
            return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan").lower())
    except ValueError:
        kind = "broken"
    if kind != "str":
        problems.append(Problem(place, f"cannot read '{text}' with the tag {node.tag}"))
    return text


def _place(file: str, mark: yaml.Mark | None) -> Place:
    return Place(file, mark.line + 1, mark.column + 1) if mark else Place(file, 1, 1)


def _syntax(error: yaml.MarkedYAMLError) -> str:
    what = ", ".join(part for part in (error.context, error.problem) if part)
    if "found character '\\t'" in what:
        return "not YAML: a tab cannot indent; use spaces"
    if "found character" in what or "alias" in what:
        what += "; put text that begins with a sign in quotes"
    return f"not YAML: {what}"
