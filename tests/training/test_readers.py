from __future__ import annotations

import gzip
import io
import json

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.base.errors import DataError, StorageError
from elastic.training.documents import BadFileError, ReadOptions, Skipped
from elastic.training.readers import BLOCK_BYTES, check_file, lookup, read_documents
from elastic.training.sources import list_files

pytestmark = pytest.mark.unit

COMPRESSIONS = {"": None, ".gz": "gzip", ".zst": "zstd"}


def compressed(data, suffix):
    """Bytes as a file of this suffix holds them."""
    if not COMPRESSIONS[suffix]:
        return data
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, COMPRESSIONS[suffix]) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def read(path, column="text", limit=1 << 20):
    """(texts, rows, skipped) of one file."""
    (file,) = list_files([str(path)]).files
    skipped = Skipped()
    documents = list(read_documents(file, ReadOptions(column, limit), skipped))
    assert all(document.utf8 == document.text.encode() for document in documents)
    return [document.text for document in documents], [document.row for document in documents], skipped


def check(path, column="text", limit=1 << 20):
    """What the check at the start says of one file."""
    (file,) = list_files([str(path)]).files
    return check_file(file, ReadOptions(column, limit))


def write_table(path, table, **options):
    """A table in the format of the path's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, **options)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path))
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, **options)


# ------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_text_is_one_document(tmp_path, suffix):
    """A text file is one document, byte for byte, without the byte order mark that is no part of it."""
    text = "first\r\nsecond — ünïcode 🙂\n\n"
    path = tmp_path / f"a.md{suffix}"
    path.write_bytes(compressed(b"\xef\xbb\xbf" + text.encode(), suffix))
    assert read(path) == ([text], [1], Skipped())
    assert check(path)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_empty_text_is_counted(tmp_path, content):
    """A file without a visible character is no document and is counted."""
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == ([], [], Skipped(empty=1))


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_invalid_utf8_is_named_by_its_offset(tmp_path, suffix):
    """Bytes that are not UTF-8 are an error with file and byte offset, never replaced in silence."""
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compressed(b"good" * 10 + b"\xff\xfe", suffix))
    with pytest.raises(BadFileError, match=r"not valid UTF-8.*0xff at byte offset 40") as caught:
        read(path)
    assert caught.value.where == str(path)
    assert "iconv" in caught.value.fix


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_large_text_is_refused(tmp_path, suffix):
    """A document above the limit is refused with both numbers, also when it is small on the disk."""
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compressed(b"x" * 3000, suffix))
    assert read(path, limit=3000)[0] == ["x" * 3000]
    with pytest.raises(BadFileError, match=r"max_document_mb.*3000.*2999"):
        read(path, limit=2999)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_damaged_compression_is_noticed(tmp_path, suffix, name):
    """A compressed file that was cut off, is empty or is something else is bad, whatever came before."""
    whole = compressed(b'{"text": "x"}\n' * 20_000, suffix)
    for damage in (whole[: len(whole) // 2], whole[:-3], b"", b"something else"):
        (tmp_path / (name + suffix)).write_bytes(damage)
        with pytest.raises(BadFileError, match=name):
            read(tmp_path / (name + suffix))


def test_joined_gzip_members(tmp_path):
    """Files that were compressed in pieces are read to their end."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert read(tmp_path / "a.txt.gz")[0] == ["one two"]


# ------------------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_json_lines(tmp_path, suffix):
    """One document a line; null, missing and blank ones are counted; blank lines do not matter."""
    lines = [
        '{"text": "one"}',
        "",
        '{"text": null}',
        '{"other": 1}',
        '{"text": "  "}',
        '{"text": "two\\nlines \\u00e9", "x": [1]}\r',
    ]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compressed("\n".join(lines).encode(), suffix))
    assert read(path) == (["one", "two\nlines é"], [1, 6], Skipped(null=2, empty=1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(sizes=st.lists(st.sampled_from([1, 100, BLOCK_BYTES - 40, BLOCK_BYTES, 3 * BLOCK_BYTES]), max_size=5))
def test_lines_of_any_length(tmp_path, sizes):
    """Lines shorter and longer than the read block, with or without a newline at the end, are read whole."""
    texts = [str(number) + "x" * size for number, size in enumerate(sizes)]
    content = "\n".join(json.dumps({"text": text}) for text in texts) + "\n" * (len(sizes) % 2)
    (tmp_path / "a.jsonl").write_text(content)
    assert read(tmp_path / "a.jsonl", limit=4 * BLOCK_BYTES)[0] == texts


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("size", [5000, 3 * BLOCK_BYTES])
def test_long_lines_are_refused_by_number(tmp_path, suffix, size):
    """A line above the limit is refused with file and line, without reading the rest."""
    content = b'{"text": "ok"}\n' * 3 + b'{"text": "' + b"x" * size + b'"}\n{"text": "ok"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compressed(content, suffix))
    assert len(read(path, limit=size + 100)[0]) == 5
    with pytest.raises(BadFileError, match=r"line is larger than data.max_document_mb") as caught:
        read(path, limit=4000)
    assert caught.value.where == f"{path}:4"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "'text' is not text.*int 5"),
        ('{"text": ["a"]}', "'text' is not text.*list"),
        ('{"text": {"a": 1}}', "'text' is not text.*dict"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["text"]', "not a JSON object"),
        ('"text"', "not a JSON object"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    """A line that holds no text is refused with file, line and what was there."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(BadFileError, match=message) as caught:
        read(path)
    assert caught.value.where == f"{path}:2"
    assert "on_bad_file" in caught.value.fix


def test_invalid_utf8_in_a_line(tmp_path):
    """In JSON lines the message has the line and the offset inside it."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(BadFileError, match="byte offset 10 of the line"):
        read(path)


def test_lookup_reaches_into_records():
    """An exact name wins, dots reach into records, missing parts are null, other things are refused."""
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": {"b": {"c": 3}}}, "a.b.c") == 3
    assert lookup({"a": {"b.c": 4}}, "a.b.c") == 4
    assert lookup({"a.b": {"c": 5}}, "a.b.c") == 5
    assert lookup({"a": None}, "a.b") is lookup({}, "a.b") is None
    with pytest.raises(LookupError, match="'a' is a list"):
        lookup({"a": [{"b": 1}]}, "a.b")


# ------------------------------------------------------------------------------------- tables

TEXT_TYPES = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_tables(tmp_path, suffix, kind):
    """Every kind of text column is read; null and blank rows are counted; rows count from 1."""
    table = pa.table({"id": [1, 2, 3, 4], "text": pa.array(["one", None, "", "two"], pa.string()).cast(kind)})
    write_table(tmp_path / f"a{suffix}", table)
    assert read(tmp_path / f"a{suffix}") == (["one", "two"], [1, 4], Skipped(null=1, empty=1))
    assert check(tmp_path / f"a{suffix}")


def test_string_views(tmp_path):
    """Arrow's string views are text."""
    write_table(tmp_path / "a.arrow", pa.table({"text": pa.array(["a" * 40, None, "b"], pa.string_view())}))
    assert read(tmp_path / "a.arrow")[0] == ["a" * 40, "b"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_nested_text_beside_lists(tmp_path, suffix):
    """Text inside structs is read by its dotted name, nulls of the struct count, lists do not hurt."""
    rows = [
        {"meta": {"n": 1, "body": {"text": "one"}}, "turns": [{"role": "a", "content": "x" * 50}] * 30},
        {"meta": None, "turns": None},
        {"meta": {"n": 2, "body": {"text": "two"}}, "turns": []},
    ] * 200
    table = pa.Table.from_pylist(rows)
    write_table(tmp_path / f"a{suffix}", table, **({"row_group_size": 70} if suffix == ".parquet" else {}))
    texts, _, skipped = read(tmp_path / f"a{suffix}", "meta.body.text")
    assert texts == ["one", "two"] * 200
    assert skipped.null == 200


def test_a_dotted_name_is_a_name_first(tmp_path):
    """A column whose own name has a dot wins over nesting."""
    for suffix in (".parquet", ".arrow"):
        write_table(tmp_path / f"a{suffix}", pa.table({"a": [{"b": "nested"}], "a.b": ["flat"]}))
        assert read(tmp_path / f"a{suffix}", "a.b")[0] == ["flat"]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("body", "no column 'body'.*the columns id, turns, meta, blob"),
        ("meta.nothing", "no column 'meta.nothing'"),
        ("id", "does not hold text.*int64"),
        ("blob", "does not hold text.*binary"),
        ("meta", "does not hold text.*struct"),
        ("turns", "does not hold text.*list"),
        ("turns.content", "reaches into a list or map.*'turns' of type list"),
    ],
)
def test_columns_that_cannot_be_read_are_named_at_the_start(tmp_path, suffix, column, message):
    """A missing or unfit text column is told from the schema alone, with file, columns or type."""
    table = pa.table({"id": [1], "turns": [[{"content": "x"}]], "meta": [{"x": "y"}], "blob": [b"z"]})
    write_table(tmp_path / f"a{suffix}", table)
    for ask in (check, read):
        with pytest.raises(DataError, match=message) as caught:
            ask(tmp_path / f"a{suffix}", column)
        assert not isinstance(caught.value, BadFileError), "on_bad_file must not hide a wrong option"
        assert "data.text_column" in caught.value.fix


def test_twin_columns_are_refused(tmp_path):
    """Two columns of the asked name are ambiguous."""
    write_table(tmp_path / "a.arrow", pa.table([["a"], ["b"]], names=["text", "text"]))
    with pytest.raises(DataError, match="several columns 'text'"):
        read(tmp_path / "a.arrow")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_tables_without_rows_are_fine(tmp_path, suffix):
    """A table of no rows, or of nothing but nulls, holds no document and is no error."""
    write_table(tmp_path / f"a{suffix}", pa.table({"text": pa.array([], pa.string())}))
    assert read(tmp_path / f"a{suffix}")[0] == []
    write_table(tmp_path / f"a{suffix}", pa.table({"text": pa.nulls(3)}))
    assert read(tmp_path / f"a{suffix}") == ([], [], Skipped(null=3))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_damaged_tables_are_bad_files(tmp_path, suffix):
    """Empty, cut off and foreign files under a table's name are named."""
    path = tmp_path / f"a{suffix}"
    write_table(path, pa.table({"text": [f"text {number} " * 20 for number in range(5000)]}))
    whole = path.read_bytes()
    for damage in (b"", whole[: len(whole) // 2], whole[:20], b"PAR1 but not really", b"plain text\n" * 100):
        path.write_bytes(damage)
        with pytest.raises(BadFileError, match="cannot be read") as caught:
            read(path)
        assert caught.value.where == str(path)


def test_old_feather_says_so(tmp_path):
    """Feather version 1 is refused by name, with the way to convert it."""
    (tmp_path / "a.feather").write_bytes(b"FEA1" + b"\0" * 100)
    with pytest.raises(BadFileError, match="Feather version 1"):
        read(tmp_path / "a.feather")


def test_invalid_utf8_in_a_table_is_named_by_its_row(tmp_path):
    """A row of broken text is found among good ones."""
    good = [b"fine"] * 300
    column = pa.array([*good, b"\xff\xfe", *good]).view(pa.string())
    write_table(tmp_path / "a.arrow", pa.table({"text": column}))
    with pytest.raises(BadFileError, match="not valid UTF-8") as caught:
        read(tmp_path / "a.arrow")
    assert caught.value.where.endswith("a.arrow:301")


def test_large_rows_are_refused_by_number(tmp_path):
    """A row above the limit is refused with file and row."""
    write_table(tmp_path / "a.parquet", pa.table({"text": ["x", "y" * 2000]}))
    with pytest.raises(BadFileError, match="max_document_mb") as caught:
        read(tmp_path / "a.parquet", limit=1999)
    assert caught.value.where.endswith("a.parquet:2")


# ------------------------------------------------------------------------------------- the start


def test_json_lines_are_checked_at_the_start(tmp_path):
    """A key that none of the first lines has is a mistake; one that only the first lacks is not."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": 2, "text": "x"}\n')
    assert check(path)
    with pytest.raises(DataError, match=r"no column 'body'.*the columns id, text"):
        check(path, "body")
    path.write_text('{"text": ["a"]}\n')
    with pytest.raises(DataError, match="'text' is not text") as caught:
        check(path)
    assert not isinstance(caught.value, BadFileError)
    path.write_text("")
    assert not check(path)


# ------------------------------------------------------------------------------------- file systems


class BrokenFileSystem(fsspec.AbstractFileSystem):
    """Knows its files and fails to read them, with the error of the test."""

    protocol = "broken"
    error: Exception

    def info(self, path, **options):
        return {"name": path, "size": 70, "type": "file", "etag": "1"}

    def _open(self, path, mode="rb", **options):
        if "refused" in path:
            raise self.error
        return BrokenFile(b"content" * 10)


class BrokenFile(io.BytesIO):
    """A connection that breaks."""

    def read(self, size=-1):
        raise BrokenFileSystem.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("throttled"), StorageError),
        (OSError("reset"), StorageError),
        (PermissionError("no"), BadFileError),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet", "a.arrow", "refused.txt"])
def test_failing_storage_is_not_a_bad_file(error, expected, name):
    """When the store fails the run stops resumable; only a file that may not be read is the file's fault."""
    fsspec.register_implementation("broken", BrokenFileSystem, clobber=True)
    BrokenFileSystem.error = error
    (file,) = list_files([f"broken://bucket/{name}"]).files
    with pytest.raises(expected, match=str(error)):
        list(read_documents(file, ReadOptions("text", 1000), Skipped()))


@pytest.mark.parametrize("content", [b"longer than it was before", b"short", b"same size"])
def test_a_file_that_changes_is_never_read_half(tmp_path, content):
    """A file rewritten between listing and reading is named and refused, whatever its new size."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"same-size")
    (file,) = list_files([str(path)]).files
    replacement = tmp_path / "new.txt"
    replacement.write_bytes(content)
    replacement.rename(path)
    with pytest.raises(DataError, match="changed after it was listed") as caught:
        list(read_documents(file, ReadOptions("text", 1000), Skipped()))
    assert caught.value.where == str(path)
    assert not isinstance(caught.value, BadFileError)


def test_a_file_that_vanishes_is_named(tmp_path):
    """A file deleted after it was listed is a change, not a bad file."""
    (tmp_path / "a.txt").write_text("x")
    (file,) = list_files([str(tmp_path)]).files
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"changed after it was listed.*missing"):
        list(read_documents(file, ReadOptions("text", 1000), Skipped()))
