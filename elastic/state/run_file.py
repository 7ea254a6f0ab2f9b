"""run.json: what a run is. Sealed, so that a flipped byte is found.

Keys: `run` (its id), `job` and `fleet` (resolved), `versions` (of elastic, torch, ray, Python),
`seed`, `manifest` (hash of the data's manifest), `vocab_size`, `seq_len`, and whatever the writer
adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.base.errors import RunFolderError
from elastic.state.canonical import seal, unseal
from elastic.state.layout import RUN_FILE
from elastic.state.storage import Storage


def write_run(storage: Storage, fields: Mapping[str, Any]) -> None:
    """Write or replace run.json."""
    data, _ = seal(fields, where=RUN_FILE)
    storage.write(RUN_FILE, data)


def read_run(storage: Storage) -> dict[str, Any] | None:
    """The fields of run.json, None in an empty folder; raises IntegrityError if it is damaged."""
    try:
        data = storage.read(RUN_FILE)
    except FileNotFoundError:
        return None
    fields = unseal(data, where=f"{storage.url}/{RUN_FILE}")
    del fields["sha256"]
    return fields


def require_run(storage: Storage) -> dict[str, Any]:
    """The fields of run.json; raises RunFolderError if this is no run folder."""
    fields = read_run(storage)
    if fields is None:
        raise RunFolderError(
            "not a run folder",
            where=storage.url,
            saw="no run.json",
            fix="give the folder that `elastic train` names at its start (default: runs/<job name>)",
        )
    return fields
