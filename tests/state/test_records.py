"""The chain of records: what is taken, what is skipped, and that neither is ever silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.base.errors import IntegrityError, LockHeldError
from elastic.state.canonical import seal, unseal
from elastic.state.layout import record_name
from elastic.state.records import Lineage, Record, RecordLog, load_records, parse_record
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """An empty run folder."""
    return Storage(tmp_path / "run")


def write(storage: Storage, epoch: int, count: int, after: Record | None = None) -> RecordLog:
    """An attempt that writes `count` records."""
    log = RecordLog(storage, epoch, after)
    log.append("resume" if after else "start", {"note": epoch})
    for number in range(count - 1):
        log.append("outer", {"version": number})
    return log


def names(lineage: Lineage) -> list[str]:
    """Epoch-seq of the records taken."""
    return [f"{record.epoch}-{record.seq}" for record in lineage.records]


def skipped(lineage: Lineage) -> dict[str, str]:
    """Reason by name of what was skipped."""
    return {entry.name: entry.reason for entry in lineage.skipped}


def damage(storage: Storage, name: str, position: int = 40) -> None:
    """Flip one bit of a stored file."""
    data = bytearray(storage.read(name))
    data[position % len(data)] ^= 1
    storage.write(name, bytes(data))


def test_an_empty_folder_has_no_records(storage: Storage) -> None:
    """Before the first record there is an empty lineage, and it is not an error."""
    assert load_records(storage) == Lineage([])
    assert load_records(storage).last is None


def test_records_come_back_in_order_with_their_bodies(storage: Storage) -> None:
    """What was appended over two attempts is loaded as one chain without gaps."""
    first = write(storage, 1, 3)
    write(storage, 4, 2, first.last)
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1", "1-2", "4-3", "4-4"]
    assert lineage.skipped == []
    assert lineage.abandoned == []
    assert first.last is not None
    assert lineage.records[3].body == {"note": 4, "previous": first.last.key}
    for before, after in zip(lineage.records, lineage.records[1:], strict=False):
        assert after.previous_sha256 == before.sha256


def test_what_append_returns_is_what_a_reader_sees(storage: Storage) -> None:
    """Keys and tuples are already as JSON has them when the writer goes on with them."""
    record = RecordLog(storage, 1).append("start", {"a": (1, 2), "b": {3: "x"}, "c": 0.1})
    assert record == load_records(storage).last
    assert record.body == {"a": [1, 2], "b": {"3": "x"}, "c": 0.1}


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Wherever one bit of the newest record flips, the record before it is taken, and the bad one named."""
    storage = Storage(tmp_path_factory.mktemp("run"))
    write(storage, 1, 3)
    name = record_name(1, 2)
    content = bytearray(storage.read(name))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    storage.write(name, bytes(content))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1"]
    assert list(skipped(lineage)) == [name]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"sha256":1}', b'{"sha256":"00"}', b"\xff\xfe"]
)
def test_a_half_written_record_is_skipped_by_name(storage: Storage, content: bytes) -> None:
    """Anything that is not a record in the newest place leads to the one before it."""
    write(storage, 1, 2)
    storage.write(record_name(1, 2), content)
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1"]
    assert list(skipped(lineage)) == [record_name(1, 2)]


def test_a_planted_pickle_does_not_run(storage: Storage, tmp_path: Path) -> None:
    """A pickle in a record's place is refused unread."""
    import os
    import pickle

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "trapped"),))

    write(storage, 1, 2)
    storage.write(record_name(1, 2), pickle.dumps(Trap()))
    assert list(skipped(load_records(storage))) == [record_name(1, 2)]
    assert not (tmp_path / "trapped").exists()


def test_a_removed_record_is_named_and_ends_the_lineage(storage: Storage) -> None:
    """A gap is found by its seq; what follows it is not taken, and is named too."""
    write(storage, 1, 5)
    storage.delete(record_name(1, 2))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1"]
    assert skipped(lineage) == {
        record_name(1, 2): "it is missing",
        record_name(1, 3): f"it follows {record_name(1, 2)}",
        record_name(1, 4): f"it follows {record_name(1, 2)}",
    }


def test_a_record_under_another_name_is_not_taken(storage: Storage) -> None:
    """A copy of a valid record cannot stand in for another."""
    write(storage, 1, 3)
    storage.write(record_name(1, 3), storage.read(record_name(1, 2)))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1", "1-2"]
    assert "another name" in skipped(lineage)[record_name(1, 3)]


def test_a_record_of_another_chain_is_not_taken(storage: Storage, tmp_path: Path) -> None:
    """A valid record of another run does not fit the hash of its predecessor."""
    write(storage, 1, 3)
    other = Storage(tmp_path / "other")
    log = RecordLog(other, 1)
    log.append("start", {"note": "another run"})
    for number in range(3):
        log.append("outer", {"version": number})
    storage.write(record_name(1, 3), other.read(record_name(1, 3)))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1", "1-2"]
    assert "predecessor" in skipped(lineage)[record_name(1, 3)]


def test_a_late_writer_of_a_dead_epoch_is_left_aside(storage: Storage) -> None:
    """A driver that lost its lock can add records, but the new lineage never reads them."""
    zombie = write(storage, 1, 3)
    seen = load_records(storage)
    write(storage, 2, 2, seen.last)
    zombie.append("outer", {"version": 99})
    zombie.append("outer", {"version": 100})
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1", "1-2", "2-3", "2-4"]
    assert lineage.skipped == []
    assert lineage.abandoned == [record_name(1, 3), record_name(1, 4)]


def test_an_epoch_whose_first_record_is_bad_leads_to_the_one_before(storage: Storage) -> None:
    """If an attempt's first record is damaged, the previous attempt's end is the state."""
    first = write(storage, 1, 3)
    write(storage, 2, 3, first.last)
    damage(storage, record_name(2, 3))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0", "1-1", "1-2"]
    assert set(skipped(lineage)) == {record_name(2, 3), record_name(2, 4), record_name(2, 5)}
    third = write(storage, 3, 1, lineage.last)
    assert names(load_records(storage)) == ["1-0", "1-1", "1-2", "3-3"]
    assert third.last is not None


def test_a_bad_record_in_the_past_leads_back_before_it(storage: Storage) -> None:
    """A chain is whole or it is not: a damaged old record is never jumped over."""
    first = write(storage, 1, 3)
    write(storage, 2, 3, first.last)
    damage(storage, record_name(1, 1))
    lineage = load_records(storage)
    assert names(lineage) == ["1-0"]
    assert set(skipped(lineage)) == {record_name(*key) for key in ((1, 1), (1, 2), (2, 3), (2, 4), (2, 5))}


def test_records_without_a_usable_one_are_an_error_not_a_new_run(storage: Storage) -> None:
    """If nothing is left to continue from, the run does not silently start anew."""
    write(storage, 1, 2)
    damage(storage, record_name(1, 0))
    with pytest.raises(IntegrityError, match="no usable record") as failure:
        load_records(storage)
    assert record_name(1, 0) in str(failure.value)


def test_other_files_in_the_folder_are_left_alone(storage: Storage) -> None:
    """Only names of records are records."""
    write(storage, 1, 2)
    storage.write("state/notes.txt", b"hello")
    assert names(load_records(storage)) == ["1-0", "1-1"]


def test_a_taken_name_means_another_driver(storage: Storage) -> None:
    """Two writers under one epoch: the second one stops instead of overwriting."""
    last = write(storage, 1, 2).last
    log, twin = RecordLog(storage, 2, last), RecordLog(storage, 2, last)
    log.append("resume", {"note": "first"})
    with pytest.raises(LockHeldError) as failure:
        twin.append("resume", {"note": "second"})
    assert record_name(2, 2) in str(failure.value)
    assert load_records(storage).records[-1].body["note"] == "first"


def test_a_run_starts_once(storage: Storage) -> None:
    """A second `start` in a folder with records is refused."""
    write(storage, 1, 2)
    with pytest.raises(LockHeldError, match="started already"):
        RecordLog(storage, 2).append("start", {})


def test_kinds_stand_where_they_belong(storage: Storage) -> None:
    """`start` begins a run, `resume` an epoch, and neither stands elsewhere."""
    log = RecordLog(storage, 1)
    with pytest.raises(ValueError, match="expected 'start'"):
        log.append("outer", {})
    log.append("start", {})
    with pytest.raises(ValueError, match="cannot stand here"):
        log.append("start", {})
    with pytest.raises(ValueError, match="expected 'resume'"):
        RecordLog(storage, 2, log.last).append("outer", {})
    with pytest.raises(ValueError, match="does not lie above"):
        RecordLog(storage, 1, write(storage, 3, 1, log.last).last)


def test_a_number_that_json_cannot_say_is_refused(storage: Storage) -> None:
    """NaN never becomes part of the state."""
    with pytest.raises(ValueError, match="JSON"):
        RecordLog(storage, 1).append("start", {"loss": float("nan")})
    assert storage.list() == []


def test_a_record_may_be_written_again_by_its_own_retry(storage: Storage) -> None:
    """Parsing needs the exact canonical bytes: added blanks are an alteration."""
    write(storage, 1, 1)
    data = storage.read(record_name(1, 0))
    loose = json.dumps(json.loads(data)).encode()
    assert loose != data
    with pytest.raises(IntegrityError):
        parse_record(record_name(1, 0), loose)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=12,
    )
)
@settings(max_examples=80, deadline=None)
def test_sealing_keeps_every_json_value(value: object) -> None:
    """A sealed object is read back equal, whatever JSON it holds; lone surrogates are refused."""
    try:
        data, sha256 = seal({"value": value}, where="test")
    except ValueError:
        assert "\\ud" in json.dumps(value)
        return
    assert unseal(data, where="test") == {"value": value, "sha256": sha256}
