"""Errors: four parts in order, exit codes, and a way through pickle."""

from __future__ import annotations

import pickle

import pytest

from elastic.base import errors
from elastic.base.errors import ConfigError, ElasticError, PlacementError

pytestmark = pytest.mark.unit
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ElasticError)]


def test_a_message_says_what_where_saw_fix() -> None:
    """The parts come in that order; parts that are not given leave no trace."""
    full = PlacementError("no room", where="island eu", saw="2 CPUs", fix="ask for 2 workers")
    assert str(full) == "island eu: no room (saw: 2 CPUs)\n  fix: ask for 2 workers"
    assert str(PlacementError("no room")) == "no room"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[ElasticError]) -> None:
    """Ray carries errors between processes: type, message, parts and exit code stay."""
    error = ConfigError(["a", "b"]) if kind is ConfigError else kind("what", where="w", saw="s", fix="f")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.exit_code, vars(back)) == (str(error), error.exit_code, vars(error))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_an_example_in_its_docstring(kind: type[ElasticError]) -> None:
    """Whoever catches or raises one can read when it happens."""
    assert "Example:" in (kind.__doc__ or "")
    assert kind.exit_code in {1, 2, 3, 75}
