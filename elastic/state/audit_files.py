"""The checks that read stored files: tensors, island checkpoints, the tokenised corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.base.errors import DataError, ElasticError, IntegrityError
from elastic.state import tensors
from elastic.state.audit_records import Check, verdict
from elastic.state.checkpoint import check_islands_of
from elastic.state.layout import DATA, ISLANDS, TENSORS
from elastic.state.records import Record
from elastic.state.replay import apply, digest_in, files_of, is_step, load_snapshot
from elastic.state.storage import Storage
from elastic.training.digest import digest
from elastic.training.outer import OuterState


def check_tensors(storage: Storage, records: Sequence[Record], retired: set[str]) -> Check:
    """Every snapshot and delta that was not retired is there, with the recorded hash."""
    problems: list[str] = []
    named = {file.stored.name for record in records for file in files_of(record)}
    kept = [file for record in records for file in files_of(record) if file.stored.name not in retired]
    for file in kept:
        try:
            tensors.verify(storage, file.stored)
        except IntegrityError as error:
            problems.append(f"{file.stored.name} ({file.what} of version {file.version}): {short(error)}")
    others = [name for name in storage.list(TENSORS) if name not in named]
    if problems:
        problems.insert(1, "a resume falls back before a damaged file, and trains again what came after it")
    good = f"{len(kept)} kept files with the right hashes, {len(retired)} retired"
    good += f"; {len(others)} of abandoned branches" if others else ""
    return verdict("tensor files", problems, good)


def check_replay(storage: Storage, records: Sequence[Record], retired: set[str]) -> Check:
    """From the oldest kept snapshots on, deltas lead to the recorded digest of every version."""
    problems: list[str] = []
    versions = 0
    for fragment in range(len(records[-1].body["versions"])):
        versions += _replay_fragment(storage, records, fragment, retired, problems)
    return verdict("replay", problems, f"{versions} versions follow from the kept files, bit for bit")


def _replay_fragment(
    storage: Storage, records: Sequence[Record], fragment: int, retired: set[str], problems: list[str]
) -> int:
    """The versions of one fragment that follow from the kept files."""
    state: OuterState | None = None
    versions = 0
    for record in records:
        files = [
            file for file in files_of(record) if file.fragment == fragment and file.stored.name not in retired
        ]
        snapshot = next((file.stored for file in files if file.what == "snapshot"), None)
        delta = any(file.what == "delta" for file in files)
        try:
            if state is not None and is_step(record, fragment) and (delta or snapshot is None):
                apply(storage, record, state)
                problems += _wrong_digest(record, fragment, state, "the replayed deltas give")
            if snapshot is not None:
                state, _ = load_snapshot(storage, snapshot)
                problems += _wrong_digest(record, fragment, state, f"{snapshot.name} gives")
        except IntegrityError as error:
            problems.append(f"version {record.body.get('version', 0)}: {error.where}: {short(error)}")
            state = None
        versions += state is not None and (is_step(record, fragment) or snapshot is not None)
    if state is None and not problems:
        problems.append(f"no snapshot of fragment {fragment} is left to replay from")
    return versions


def check_islands(storage: Storage) -> Check:
    """Every complete island checkpoint is what its markers say."""
    problems: list[str] = []
    complete = unfinished = 0
    for island in sorted({name.split("/")[1] for name in storage.list(ISLANDS) if name.count("/") > 1}):
        good, open_ones, bad = check_islands_of(storage, f"{ISLANDS}/{island}")
        complete, unfinished = complete + good, unfinished + open_ones
        problems += [f"{skipped.name}: {skipped.reason}" for skipped in bad]
    good_text = f"{complete} complete, hashes right" + (f"; {unfinished} unfinished" if unfinished else "")
    return verdict("island checkpoints", problems, good_text)


def check_corpus(storage: Storage, run: Mapping[str, Any]) -> Check:
    """The tokenised shards of the run are what was written, as far as they lie on this machine."""
    from elastic.training.corpus import INFO_NAME, Corpus  # needs pyarrow

    cache = ((run.get("job") or {}).get("data") or {}).get("cache_folder")
    folders = [storage.path(DATA), Path(cache).expanduser() if cache else None]
    found = [place for folder in folders if folder for place in sorted(folder.glob(f"*/{INFO_NAME}"))]
    places = {place.parent.name: place for place in reversed(found)}  # one a key, the run folder's first
    wanted = [place for key, place in places.items() if run.get("corpus") in (None, key)]
    problems: list[str] = []
    checked = 0
    for place in wanted:
        try:
            corpus = Corpus.open(place.parent)
            if run.get("manifest") in (None, corpus.info.manifest_hash):
                corpus.verify()
                checked += 1
        except (IntegrityError, DataError) as error:
            problems.append(f"{error.where}: {short(error)}")
        except (OSError, KeyError, TypeError, ElasticError) as error:
            problems.append(f"{place}: {type(error).__name__}: {error}")
    if not checked and not problems:
        return Check("corpus", True, "not on this machine; training makes it again from the sources")
    return verdict("corpus", problems, f"{checked} tokenised corpus, hashes right")


def short(error: ElasticError) -> str:
    """What is wrong and what was seen, without the place."""
    return f"{error.what}, {error.saw}" if error.saw else error.what


def retired_by(records: Sequence[Record]) -> set[str]:
    """Tensor files that the records let go."""
    return {name for record in records for name in record.body.get("retired", ())}


def _wrong_digest(record: Record, fragment: int, state: OuterState, what: str) -> list[str]:
    expected = digest_in(record, fragment)
    seen = digest(state.published) if expected else None
    if seen == expected:
        return []
    return [f"version {record.body.get('version', 0)}: {what} digest {seen}, {record.name} says {expected}"]
