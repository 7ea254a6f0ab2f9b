"""Does a run keep its promises? Everything is checked from the run folder alone.

Promised are (docs/reference/run-folder.md): the chain of records is whole; versions follow each other;
every sequence is committed once or still queued; stored files are what their hashes say; the
parameters follow from snapshots and deltas bit for bit; all islands held the recorded parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.base.errors import ElasticError, IntegrityError
from elastic.state.audit_events import StoredEvents, check_digests, read_digests
from elastic.state.audit_files import check_corpus, check_islands, check_replay, check_tensors, retired_by
from elastic.state.audit_records import (
    Check,
    check_chain,
    check_contributions,
    check_result,
    check_sequences,
    check_versions,
)
from elastic.state.layout import RECORDS, RESULT_FILE, RUN_FILE
from elastic.state.records import Lineage, load_records, read_abandoned
from elastic.state.run_file import read_run, require_run
from elastic.state.storage import Storage

_TRIES = 3


@dataclass(frozen=True)
class Audit:
    """The checks of a run, in a fixed order."""

    url: str
    checks: list[Check]

    @property
    def ok(self) -> bool:
        """True if every check passed."""
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Stable names: `run_folder`, `ok`, and `checks` with `name`, `ok`, `detail`."""
        return {"run_folder": self.url, "ok": self.ok, "checks": [check.to_json() for check in self.checks]}


def audit(storage: Storage) -> Audit:
    """Check a run; raises RunFolderError if the folder holds none.

    A run may go on meanwhile: if something fails and new records have come, all is checked again,
    since files that were retired in between are no fault.
    """
    checks, newest = _audit_once(storage)
    for _ in range(_TRIES - 1):
        if all(check.ok for check in checks) or newest == _newest_name(storage):
            break
        checks, newest = _audit_once(storage)
    return Audit(storage.url, checks)


def _audit_once(storage: Storage) -> tuple[list[Check], str]:
    newest = _newest_name(storage)
    if not newest and not storage.exists(RUN_FILE):
        require_run(storage)
    # What is written after the records that it speaks of is read before them.
    events = read_digests(storage)
    result, result_check = _read_result(storage)
    run, run_check = _read_run(storage)
    try:
        lineage = load_records(storage)
    except IntegrityError as error:
        return [run_check, Check("records", False, str(error))], newest
    if not lineage.records:
        return [run_check, Check("records", True, "none yet: nothing is committed")], newest
    return [run_check, *_checks(storage, run, lineage, events, result, result_check)], newest


def _checks(
    storage: Storage,
    run: dict[str, Any],
    lineage: Lineage,
    events: StoredEvents,
    result: dict[str, Any] | None,
    result_check: Check,
) -> list[Check]:
    records, abandoned = lineage.records, read_abandoned(storage, lineage)
    retired = retired_by([*records, *abandoned])
    calls: list[tuple[str, Callable[[], Check]]] = [
        ("records", lambda: check_chain(lineage, run)),
        ("versions", lambda: check_versions(records)),
        ("sequences", lambda: check_sequences(records)),
        ("contributions", lambda: check_contributions(records)),
        ("tensor files", lambda: check_tensors(storage, records, retired)),
        ("replay", lambda: check_replay(storage, records, retired)),
        ("digests", lambda: check_digests(events, lineage, abandoned)),
        ("result", lambda: check_result(result, records) if result is not None else result_check),
        ("island checkpoints", lambda: check_islands(storage)),
        ("corpus", lambda: check_corpus(storage, run)),
    ]
    return [_guarded(name, call) for name, call in calls]


def _guarded(name: str, call: Callable[[], Check]) -> Check:
    """A record that lacks what every record has is a failed check, not a crash of the audit."""
    try:
        return call()
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return Check(name, False, f"a record lacks what it should hold: {type(error).__name__}: {error}")
    except ElasticError as error:
        return Check(name, False, str(error))


def _read_run(storage: Storage) -> tuple[dict[str, Any], Check]:
    try:
        run = read_run(storage)
    except IntegrityError as error:
        return {}, Check("run file", False, f"{error}; nobody can say what this run was")
    if run is None:
        return {}, Check("run file", False, "run.json is missing; nobody can say what this run was")
    return run, Check("run file", True, f"run {run.get('run', '')}, hash right")


def _read_result(storage: Storage) -> tuple[dict[str, Any] | None, Check]:
    try:
        result = json.loads(storage.read(RESULT_FILE))
    except FileNotFoundError:
        return None, Check("result", True, "no result.json: the run has not ended, or was killed")
    except ValueError as error:
        return None, Check("result", False, f"result.json is not JSON: {error}")
    if not isinstance(result, dict):
        return None, Check("result", False, "result.json is not a JSON object")
    return result, Check("result", True, "")


def _newest_name(storage: Storage) -> str:
    return max(storage.list(RECORDS), default="")
