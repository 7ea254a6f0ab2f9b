"""run.json and the names of a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.base.errors import IntegrityError, RunFolderError
from elastic.state import layout
from elastic.state.run_file import read_run, require_run, write_run
from elastic.state.storage import Storage

pytestmark = pytest.mark.unit


def test_run_json_comes_back_and_can_be_replaced(tmp_path: Path) -> None:
    """What was written last is read, without the seal."""
    storage = Storage(tmp_path)
    assert read_run(storage) is None
    write_run(storage, {"run": "a", "seed": 0})
    write_run(storage, {"run": "a", "seed": 1})
    assert read_run(storage) == require_run(storage) == {"run": "a", "seed": 1}


def test_a_folder_without_run_json_is_named(tmp_path: Path) -> None:
    """The message says what is missing and where run folders usually are."""
    with pytest.raises(RunFolderError, match=r"no run\.json.*\n.*runs/<job name>"):
        require_run(Storage(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"run":"a"}', b'{"run":"a","sha256":"00"}'])
def test_a_damaged_run_json_is_an_error(tmp_path: Path, content: bytes) -> None:
    """A run file without its right seal is never taken for a new run or for another one."""
    storage = Storage(tmp_path)
    storage.write("run.json", content)
    with pytest.raises(IntegrityError, match=r"run\.json"):
        read_run(storage)


@given(st.integers(0, 10**9), st.integers(0, 10**12), st.integers(0, 99))
def test_names_are_read_back(epoch: int, number: int, fragment: int) -> None:
    """Names of records and locks say their numbers, nothing else parses, and tensor files differ by epoch."""
    assert layout.parse_record_name(layout.record_name(epoch, number)) == (epoch, number)
    assert layout.parse_lock_name(layout.lock_name(epoch)) == epoch
    assert layout.parse_lock_name(layout.beat_name(epoch)) is None
    for name in (layout.snapshot_name, layout.delta_name):
        assert name(fragment, number, epoch) != name(fragment, number, epoch + 1)
    assert layout.parse_record_name(layout.lock_name(epoch)) is None
    assert layout.parse_lock_name(layout.record_name(epoch, number)) is None
