from __future__ import annotations

import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.base.config import Data
from elastic.base.errors import DataError
from elastic.training.corpus import Corpus, prepare
from elastic.training.documents import BadFileError, Document
from elastic.training.listing import check_sources, compare, list_sources
from elastic.training.manifest import Manifest, TextHash
from elastic.training.split import MIN_FILES, Split, fraction_of

pytestmark = pytest.mark.unit


@pytest.fixture
def texts(tmp_path):
    """A folder of 40 text files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"text number {number}\n" * 20)
    return folder


def data(*sources, **options):
    """A Data section of small sequences."""
    return Data(sources=[str(source) for source in sources], **{"seq_len": 8, **options})


def manifest_of(tmp_path, settings, name="corpus"):
    """The completed manifest of a prepared corpus."""
    info = prepare(settings, tmp_path / name)
    return Corpus.open(tmp_path / name / info.key).manifest()


# ------------------------------------------------------------------------------------- held out


def test_fractions_are_fixed():
    """The hold-out rule never changes: it decides what a model has seen."""
    assert fraction_of("asyncio/base_events.py") == 0.642603657
    assert [name for name in map(str, range(100)) if fraction_of(name) < 0.1] == [
        "18",
        "72",
        "74",
        "87",
        "96",
    ]


@given(st.text(max_size=30))
def test_fractions_are_shares(name):
    """Every name has a fraction in [0, 1)."""
    assert 0 <= fraction_of(name) < 1


def test_files_are_held_out_whole(texts):
    """From 20 files on, whole files are held out, whatever the order of the listing and the seed."""
    manifest = check_sources(data(texts))
    assert manifest.split.rule == "files"
    held_out = [file.name.rpartition("/")[2] for file in manifest.files if file.part == "validation"]
    assert 1 <= len(held_out) <= 12
    assert sorted(held_out) == sorted(
        f"{number}.txt" for number in range(40) if fraction_of(f"{number}.txt") < 0.1
    )


def test_the_hold_out_moves_with_the_data(texts, tmp_path):
    """A corpus that is moved as a whole holds out the same files."""
    shutil.copytree(texts, tmp_path / "elsewhere/copy")
    parts = [
        {file.name.rpartition("/")[2]: file.part for file in check_sources(data(folder)).files}
        for folder in (texts, tmp_path / "elsewhere/copy")
    ]
    assert parts[0] == parts[1]


def test_few_text_files_hold_out_their_tails(tmp_path):
    """One file is enough: its last tenth is held out, from the start of a line, and nothing is lost."""
    text = "".join(f"line {number}\n" for number in range(1000))
    (tmp_path / "input.txt").write_text(text)
    listing = list_sources(data(tmp_path / "input.txt"))
    split = listing.manifest.split
    assert (split.rule, listing.manifest.files[0].part) == ("tails", "both")
    pieces = dict(split.divide(listing.files[0], "both", Document(text, text.encode(), 1)))
    assert pieces["train"] + pieces["validation"] == text
    assert pieces["validation"].startswith("line ")
    assert 0.09 < len(pieces["validation"]) / len(text) < 0.1


@given(text=st.text(alphabet="ab\n", max_size=40), share=st.floats(0.01, 0.99))
def test_tails_lose_nothing(text, share):
    """Whatever the text and the share, the two pieces are the text."""
    pieces = [piece for _, piece in Split("tails", share).divide(None, "both", Document(text, b"", 1))]
    assert "".join(pieces) == text


def test_few_tables_hold_out_documents(tmp_path):
    """Fewer than 20 files of many documents hold out single documents, by file and row."""
    rows = 1000
    pq.write_table(pa.table({"text": [f"document {row}" for row in range(rows)]}), tmp_path / "a.parquet")
    listing = list_sources(data(tmp_path / "a.parquet"))
    assert listing.manifest.split.rule == "documents"
    parts = [
        part
        for row in range(rows)
        for part, _ in listing.manifest.split.divide(listing.files[0], "both", Document("x", b"x", row + 1))
    ]
    assert 0.07 < parts.count("validation") / rows < 0.13


def test_many_files_of_which_none_is_held_out(texts):
    """When the hashes of the names leave a part empty, the next rule is used."""
    assert MIN_FILES <= 40
    assert check_sources(data(texts, validation_share=1e-6)).split.rule == "tails"


def test_named_validation_sources(texts, tmp_path):
    """Named sources are held out whole, and everything else is for training."""
    (tmp_path / "held.txt").write_text("held out")
    manifest = check_sources(data(texts, validation_sources=[str(tmp_path / "held.txt")]))
    assert [file.name for file in manifest.files if file.part == "validation"] == [str(tmp_path / "held.txt")]
    assert {file.part for file in manifest.files} == {"train", "validation"}


def test_a_file_in_both_parts_is_an_error(texts, tmp_path):
    """A held-out file that is also trained on is named, also when a link hides it."""
    (tmp_path / "link.txt").symlink_to(texts / "7.txt")
    with pytest.raises(DataError, match=r"both data\.sources and data\.validation_sources") as caught:
        check_sources(data(texts, validation_sources=[str(tmp_path / "link.txt")]))
    assert "7.txt" in caught.value.saw


# ------------------------------------------------------------------------------------- the start


def test_check_needs_no_reading(texts):
    """The check knows names, sizes and parts, and has read nothing."""
    manifest = check_sources(data(texts))
    assert len(manifest.files) == 40
    assert all(file.text_sha256 == "" and file.version for file in manifest.files)


@pytest.mark.parametrize("options", [{}, {"on_bad_file": "skip"}])
@pytest.mark.parametrize("position", [0, 150, 299])
def test_a_missing_column_is_found_at_the_start(tmp_path, options, position):
    """One table without the column among many stops at once, and is not a file to skip."""
    for number in range(300 if position else 3):
        column = "body" if number == position else "text"
        (tmp_path / f"{number:03d}.jsonl").write_text(json.dumps({column: "x" * 100}) + "\n")
    settings = data(tmp_path, **options)
    if position == 150:  # only some of so many are opened at the start; the others when they are read
        with pytest.raises(DataError, match=r"no column 'text'.*body"):
            prepare(settings, tmp_path / "corpus")
    else:
        with pytest.raises(DataError, match=r"no column 'text'.*body") as caught:
            check_sources(settings)
        assert f"{position:03d}.jsonl" in caught.value.where


@pytest.mark.parametrize(
    "files",
    [
        {"a.txt": b""},
        {"a.jsonl": b"", "b.jsonl": b"\n\n"},
        {"a.txt": b" \n", "b.jsonl": b'{"text": null}\n'},
    ],
)
def test_a_corpus_without_documents_is_an_error(tmp_path, files):
    """Sources whose files hold no document are an empty corpus, told before anything is trained."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="empty corpus") as caught:
        prepare(data(folder), tmp_path / "corpus")
    assert caught.value.exit_code == 2
    assert list((tmp_path / "corpus").glob("*")) == [] if (tmp_path / "corpus").exists() else True


def test_an_empty_table_is_no_reason_to_stop(texts):
    """A table of no rows beside real text is fine, and is in the manifest."""
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), texts / "none.parquet")
    assert len(check_sources(data(texts)).files) == 41


def test_empty_validation_sources_are_named(texts, tmp_path):
    """An empty held-out part is told with the option it comes from."""
    (tmp_path / "held.txt").write_bytes(b"")
    with pytest.raises(DataError, match="empty corpus") as caught:
        check_sources(data(texts, validation_sources=[str(tmp_path / "held.txt")]))
    assert caught.value.where == "data.validation_sources"


def test_a_broken_table_stops_unless_it_may_be_skipped(texts):
    """At the start already, a broken file stops the run by default, and by option does not."""
    (texts / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadFileError, match=r"broken\.parquet"):
        check_sources(data(texts))
    assert len(check_sources(data(texts, on_bad_file="skip")).files) == 41


def test_nothing_but_broken_files_is_an_empty_corpus(tmp_path):
    """When every file is skipped, the error has the first reason."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"empty corpus.*1 of them skipped.*a\.parquet"):
        check_sources(data(tmp_path, on_bad_file="skip"))


# ------------------------------------------------------------------------------------- identity


def test_text_hash_is_of_the_documents():
    """Where one document ends matters; how the file was written does not."""
    hashes = []
    for documents in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"]):
        digest = TextHash()
        for document in documents:
            digest.add(document)
        hashes.append(digest.hexdigest())
    assert len(set(hashes)) == 3


def test_manifest_round_trip(texts, tmp_path):
    """A stored manifest comes back equal, with the same hash."""
    (texts / "_left_out.txt").write_text("x")
    manifest = manifest_of(tmp_path, data(texts, texts / "3.txt"))
    again = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert again == manifest
    assert again.hash == manifest.hash
    assert any("ignored" in note and "_left_out.txt" in note for note in manifest.notes())
    assert any("listed twice" in note and "3.txt" in note for note in manifest.notes())


def test_manifest_hash_is_the_same_on_every_machine(texts, tmp_path, monkeypatch):
    """The hash follows names, sizes and content, not times, places or the order of the file system."""
    monkeypatch.chdir(tmp_path)
    before = manifest_of(tmp_path, data("texts"), "one")
    (tmp_path / "other").mkdir()
    for name in sorted(os.listdir(texts), reverse=True):
        (tmp_path / "other/texts").mkdir(exist_ok=True)
        shutil.copyfile(texts / name, tmp_path / "other/texts" / name)
        os.utime(tmp_path / "other/texts" / name, (5, 5))
    monkeypatch.chdir(tmp_path / "other")
    after = manifest_of(tmp_path, data("texts"), "two")
    assert after.hash == before.hash
    (tmp_path / "other/texts/3.txt").write_text("another number 3\n" * 20)
    assert manifest_of(tmp_path, data("texts"), "three").hash != before.hash


# ------------------------------------------------------------------------------------- later


def test_compare_names_each_change(texts, tmp_path):
    """New, missing, resized and rewritten files are each named; a mere touch is no change."""
    settings = data(texts)
    manifest = manifest_of(tmp_path, settings)
    assert compare(manifest, settings) == []
    os.utime(texts / "1.txt", (5, 5))
    assert compare(manifest, settings) == []
    (texts / "2.txt").write_text("longer " * 1000)
    (texts / "3.txt").write_text((texts / "3.txt").read_text().replace("3", "x"))
    (texts / "4.txt").unlink()
    (texts / "new.txt").write_text("new")
    changes = {change.name.rpartition("/")[2]: change.what for change in compare(manifest, settings)}
    assert changes == {
        "2.txt": "size 280 -> 7000 bytes",
        "3.txt": "other content",
        "4.txt": "missing",
        "new.txt": "new",
    }


def test_compare_survives_sources_that_are_gone(texts, tmp_path):
    """The tokenised copy goes on without its sources: that they are gone is a change, not an error."""
    manifest = manifest_of(tmp_path, data(texts))
    shutil.rmtree(texts)
    (change,) = compare(manifest, data(texts))
    assert "no such file or folder" in str(change)
