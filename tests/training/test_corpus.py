from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import elastic
from elastic.base.config import Data
from elastic.base.errors import DataError, IntegrityError, RunFolderError, StorageError
from elastic.training.corpus import Corpus, prepare, require_space
from elastic.training.documents import BadFileError
from elastic.training.shards import Layout, Sequences, SequenceWriter
from elastic.training.tokenizer import load_tokenizer

pytestmark = pytest.mark.unit

END = 256


def data(*sources, **options):
    """A Data section of small sequences."""
    return Data(sources=[str(source) for source in sources], **{"seq_len": 8, **options})


def prepared(folder, settings_, **options):
    """Prepare and open."""
    info = prepare(settings_, folder, **options)
    return Corpus.open(folder / info.key)


def stream_of(part):
    """The tokens of a part, put back together from its sequences."""
    rows = part.take(np.arange(len(part)))
    assert np.array_equal(rows[1:, 0], rows[:-1, -1])
    return np.concatenate([rows[:1, 0], rows[:, 1:].reshape(-1)])


def expected_stream(texts, seq_len=8):
    """The tokens of texts with an end of document each, cut to whole sequences."""
    tokens = [token for text in texts for token in [*text.encode(), END]]
    return tokens[: (len(tokens) - 1) // seq_len * seq_len + 1], tokens


@pytest.fixture
def two_files(tmp_path):
    """(training file, held-out file) of JSON lines."""
    for name in ("train", "held"):
        lines = [json.dumps({"text": f"{name} document {number} " * (number % 7)}) for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path / "train.jsonl", tmp_path / "held.jsonl"


def two_parts(two_files, **options):
    """A Data section with a named held-out file."""
    return data(two_files[0], validation_sources=[str(two_files[1])], **options)


# ------------------------------------------------------------------------------------- packing


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=20),
    seq_len=st.integers(1, 9),
    batch=st.integers(1, 5),
    shard=st.integers(1, 3),
)
def test_packing_loses_and_repeats_nothing(tmp_path, lengths, seq_len, batch, shard):
    """Whatever the documents and the layout, sequence i holds tokens i*L .. i*L+L; the rest is counted."""
    layout = Layout(seq_len, "uint16", batch, shard)
    writer = SequenceWriter(tmp_path, "train", layout)
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    for piece in np.split(tokens, np.cumsum(lengths)[:-1] if lengths else []):
        writer.add(piece)
    dropped = writer.close()
    part = Sequences(tmp_path, tuple(writer.shards), layout)
    count = max(0, len(tokens) - 1) // seq_len
    assert len(part) == writer.sequences == count
    if count:
        expected = np.stack([tokens[i * seq_len : i * seq_len + seq_len + 1] for i in range(count)])
        assert np.array_equal(part.take(np.arange(count)), expected)
        assert dropped == len(tokens) - 1 - count * seq_len
    else:
        assert dropped == len(tokens)
    assert all(np.ceil(each.sequences / batch) <= shard for each in writer.shards)


def test_take_any_ids_in_any_order(two_files, tmp_path):
    """Rows come in the order asked for, with repeats, across shards, as int64."""
    corpus = prepared(tmp_path / "corpus", two_parts(two_files), batch_tokens=64, shard_tokens=256)
    assert len(corpus.info.train.shards) > 5
    rows = corpus.train.take(np.arange(len(corpus.train)))
    ids = np.random.default_rng(0).integers(0, len(corpus.train), 100)
    taken = corpus.train.take(ids)
    assert taken.dtype == np.int64
    assert np.array_equal(taken, rows[ids])
    assert corpus.train.take(np.array([], dtype=np.int64)).shape == (0, 9)


def test_ids_outside_are_refused(two_files, tmp_path):
    """Ids below 0, above the end, or not integers never wrap around."""
    part = prepared(tmp_path / "corpus", two_parts(two_files)).train
    for ids in ([-1], [len(part)], [0.0], [[0]], np.array([2**63], dtype=np.uint64)):
        with pytest.raises(IndexError, match="ids must be"):
            part.take(np.array(ids))


def test_the_corpus_is_the_documents(two_files, tmp_path):
    """Tokens are the documents in order, each with its end, nulls and blanks left out; counts are exact."""
    train, held = two_files
    with train.open("a") as file:
        file.write('\n{"text": null}\n{"text": " "}\n{"text": "the last one"}')
    corpus = prepared(tmp_path / "corpus", two_parts(two_files))
    for part, info, path in (
        (corpus.train, corpus.info.train, train),
        (corpus.validation, corpus.info.validation, held),
    ):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        texts = [text for text in texts if text and text.strip()]
        expected, tokens = expected_stream(texts)
        assert stream_of(part).tolist() == expected
        assert info.documents == len(texts)
        assert info.bytes == sum(len(text.encode()) for text in texts)
        assert info.tokens == len(tokens)
        assert info.dropped_tokens == len(tokens) - len(expected)
        assert info.tokens_per_byte == info.tokens / info.bytes
    info = corpus.info
    assert (info.null_rows, info.empty_documents) == (1, 1 + 2 * 29)
    assert (info.vocab_size, info.end_of_document, info.seq_len) == (257, END, 8)
    assert info.documents == info.train.documents + info.validation.documents
    assert info.bytes == info.train.bytes + info.validation.bytes


def test_builtin_stdlib(tmp_path):
    """The built-in corpus holds out more than a megabyte, by file, and decodes to Python."""
    corpus = prepared(tmp_path, Data())
    assert corpus.info.validation.bytes >= 1_000_000
    assert corpus.info.train.bytes > 7_000_000
    assert corpus.manifest().split.rule == "files"
    text = load_tokenizer(Data().tokenizer).decode(stream_of(corpus.validation))
    assert text.count("\ndef ") > 200
    names = (tmp_path / corpus.info.key / "manifest.json").read_text()
    assert str(Path(os.__file__).parent) not in names, "no path of this machine"


def test_larger_vocabularies_take_wider_tokens(tmp_path):
    """Ids above 65535 come back whole."""
    layout = Layout(2, "uint32", 4, 1)
    writer = SequenceWriter(tmp_path, "train", layout)
    writer.add(np.array([70_000, 1, 4_000_000_000], dtype=np.uint32))
    writer.close()
    assert Sequences(tmp_path, tuple(writer.shards), layout).take(np.array([0])).tolist() == [
        [70_000, 1, 4_000_000_000]
    ]


def test_tokenizer_files(tmp_path):
    """A corpus with a tokenizer of merges is bound to that tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2, "<|endoftext|>": 9}, "?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c " * 50)
    settings_ = data(
        tmp_path / "a.txt", tokenizer={"kind": "tokenizers", "file": str(tmp_path / "tokenizer.json")}
    )
    corpus = prepared(tmp_path / "corpus", settings_)
    assert corpus.info.vocab_size == 10
    assert corpus.info.end_of_document == 9
    assert corpus.train.take(np.array([0])).tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 2]]


# ------------------------------------------------------------------------------------- once


def test_the_second_time_nothing_is_read(two_files, tmp_path):
    """A finished corpus is used as it is; another option or another file is another corpus."""
    calls = []
    first = prepare(two_parts(two_files), tmp_path / "corpus", lambda *args: calls.append(args))
    assert calls
    calls.clear()
    assert prepare(two_parts(two_files), tmp_path / "corpus", lambda *args: calls.append(args)) == first
    assert calls == []
    others = [two_parts(two_files, seq_len=16), two_parts(two_files, on_bad_file="skip")]
    keys = {prepare(other, tmp_path / "corpus").key for other in others}
    two_files[0].write_text('{"text": "something else entirely, long enough for a sequence"}')
    keys.add(prepare(two_parts(two_files), tmp_path / "corpus").key)
    assert len(keys | {first.key}) == 4


def test_the_same_sources_give_the_same_bytes(two_files, tmp_path):
    """Two preparations are identical to the last byte, so machines can be compared by their hashes."""
    one = prepare(two_parts(two_files), tmp_path / "one")
    two = prepare(two_parts(two_files), tmp_path / "two")
    assert one == two
    assert [shard.sha256 for shard in one.train.shards] == [shard.sha256 for shard in two.train.shards]


def test_progress_counts_bytes_of_sources(tmp_path):
    """Progress rises to the size of the sources, and is told inside large files as well."""
    for name in ("a", "b"):
        lines = (json.dumps({"text": "x" * 1000}) for _ in range(12_000))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    total = sum((tmp_path / f"{name}.jsonl").stat().st_size for name in ("a", "b"))
    calls = []
    prepare(data(tmp_path), tmp_path / "corpus", lambda *args: calls.append(args))
    assert {stage for stage, _, _ in calls} == {"reading"}
    assert {whole for _, _, whole in calls} == {total}
    done = [value for _, value, _ in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert len(done) > total / (5 << 20)


# ------------------------------------------------------------------------------------- bad input


@pytest.fixture
def with_bad_file(two_files, tmp_path):
    """A folder of good files and one that is cut off late."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a", "c"):
        (folder / f"{name}.jsonl").write_bytes(two_files[0].read_bytes())
    whole = gzip.compress(b'{"text": "of the bad file"}\n' * 100_000)
    (folder / "b.jsonl.gz").write_bytes(whole[:-8])
    return folder


def test_a_bad_file_stops_by_default(with_bad_file, two_files, tmp_path):
    """A file that breaks off stops the run with its name and the way around it, and leaves nothing behind."""
    with pytest.raises(
        BadFileError, match=r"b\.jsonl\.gz: the file cannot be read.*(?s:.*)on_bad_file: skip"
    ) as caught:
        prepare(data(with_bad_file, validation_sources=[str(two_files[1])]), tmp_path / "corpus")
    assert caught.value.exit_code == 2
    assert list((tmp_path / "corpus").iterdir()) == []


def test_a_skipped_file_leaves_nothing(with_bad_file, two_files, tmp_path):
    """By option a bad file is skipped whole and named; the corpus is that of the other files."""
    options = {"validation_sources": [str(two_files[1])], "on_bad_file": "skip"}
    corpus = prepared(tmp_path / "corpus", data(with_bad_file, **options))
    (with_bad_file / "b.jsonl.gz").unlink()
    clean = prepared(tmp_path / "clean", data(with_bad_file, **options))
    assert np.array_equal(stream_of(corpus.train), stream_of(clean.train))
    assert corpus.info.train == clean.info.train
    ((name, reason),) = corpus.info.skipped_files
    assert name.endswith("b.jsonl.gz")
    assert "cannot be read" in reason
    assert any("1 skipped" in note and "b.jsonl.gz" in note for note in corpus.info.notes)


@pytest.mark.parametrize("content", [b"rewritten, longer than before " * 9, b"short", None])
def test_a_file_that_changes_meanwhile_is_named(tmp_path, content):
    """A file rewritten or deleted meanwhile stops the preparation, even when bad files are skipped."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("some text that is long enough\n" * 5)

    def meddle(stage, done, total):
        if done:
            (folder / "b.txt").unlink(missing_ok=True)
            if content is not None:
                (folder / "b.txt").write_bytes(content)

    with pytest.raises(DataError, match="changed after it was listed") as caught:
        prepare(data(folder, on_bad_file="skip"), tmp_path / "corpus", meddle)
    assert caught.value.where == str(folder / "b.txt")


def test_too_little_text_says_what_to_do(tmp_path):
    """A part that fills no sequence is an error with the numbers."""
    (tmp_path / "a.txt").write_text("tiny")
    with pytest.raises(DataError, match=r"does not fill one sequence.*a sequence holds 9") as caught:
        prepare(data(tmp_path / "a.txt"), tmp_path / "corpus")
    assert "data.seq_len" in caught.value.fix


def test_one_text_file_is_enough(tmp_path):
    """The commonest first try, a single text file, trains on its beginning and validates on its end."""
    text = "".join(f"line number {number}\n" for number in range(500))
    (tmp_path / "input.txt").write_text(text)
    corpus = prepared(tmp_path / "corpus", data(tmp_path / "input.txt"))
    assert corpus.info.train.bytes + corpus.info.validation.bytes == len(text)
    decode = load_tokenizer(Data().tokenizer).decode
    assert text.startswith(decode(stream_of(corpus.train)))
    assert decode(stream_of(corpus.validation)).startswith("line number 4")


def test_remote_sources(tmp_path):
    """Any fsspec file system works as a source, tables included."""
    memory = fsspec.filesystem("memory")
    table = pa.table({"id": range(400), "text": [f"document {number}" for number in range(400)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=50)
    memory.pipe("/remote-corpus/a.parquet", sink.getvalue().to_pybytes())
    try:
        corpus = prepared(tmp_path, data("memory://remote-corpus"))
        assert corpus.info.documents == 400
        assert corpus.info.validation.documents > 10
    finally:
        memory.rm("/remote-corpus", recursive=True)


# ------------------------------------------------------------------------------------- the folder


def test_open_without_a_corpus(tmp_path):
    """A folder without a finished corpus is told apart from a damaged one."""
    with pytest.raises(DataError, match="no prepared corpus"):
        Corpus.open(tmp_path)


def test_missing_and_cut_shards_are_noticed_on_opening(two_files, tmp_path):
    """A shard of another size is named, by `open` and by a second `prepare`, with the way out."""
    corpus = prepared(tmp_path, two_parts(two_files))
    shard = corpus.folder / corpus.info.train.shards[0].name
    content = shard.read_bytes()
    for damage in (content[:-1], content + b"x", None):
        shard.unlink() if damage is None else shard.write_bytes(damage)
        for action in (lambda: Corpus.open(corpus.folder), lambda: prepare(two_parts(two_files), tmp_path)):
            with pytest.raises(IntegrityError, match=shard.name) as caught:
                action()
            assert f"delete {corpus.folder}" in caught.value.fix


@pytest.mark.parametrize("part", ["train", "validation"])
def test_one_flipped_byte_is_found_by_verify(two_files, tmp_path, part):
    """`verify` reads everything and names the file with a changed byte."""
    corpus = prepared(tmp_path, two_parts(two_files))
    corpus.verify()
    path = corpus.folder / getattr(corpus.info, part).shards[0].name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=path.name):
        Corpus.open(corpus.folder).verify()


def test_an_altered_manifest_is_found_by_verify(two_files, tmp_path):
    """The manifest is bound to the corpus by its hash."""
    corpus = prepared(tmp_path, two_parts(two_files))
    path = corpus.folder / "manifest.json"
    path.write_text(path.read_text().replace('"text_sha256": "', '"text_sha256": "0', 1))
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        Corpus.open(corpus.folder).verify()


def test_another_format_is_refused(two_files, tmp_path):
    """A corpus of another version is named as such."""
    corpus = prepared(tmp_path, two_parts(two_files))
    path = corpus.folder / "corpus.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(IntegrityError, match="format 99"):
        Corpus.open(corpus.folder)


def test_an_unwritable_folder_is_named(two_files, tmp_path):
    """A folder that cannot be made is an error of the configuration, with the option to set."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written") as caught:
        prepare(two_parts(two_files), tmp_path / "file" / "corpus")
    assert "data.cache_folder" in caught.value.fix


def test_missing_space_is_told_before_the_start(tmp_path):
    """When plain text surely does not fit, both numbers are in the message, and the run is resumable."""
    require_space(10, 10, tmp_path)
    with pytest.raises(StorageError, match="10 bytes free, at least 11 needed") as caught:
        require_space(11, 10, tmp_path)
    assert caught.value.exit_code == 75


# ------------------------------------------------------------------------------------- processes


def run_python(script, *arguments):
    """Run a script with this project on its path; its memory is what it uses, not what a pool keeps."""
    project = str(Path(elastic.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": project, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


PREPARE = """
import json, os, signal, sys
from elastic.base.config import Data
from elastic.training.corpus import prepare
train, held, folder = sys.argv[1:4]
data = Data(sources=[train], validation_sources=[held], seq_len=8)
"""


def test_a_killed_preparation_is_done_again(two_files, tmp_path):
    """SIGKILL in the middle leaves nothing that looks finished; the next try cleans up and is the same."""
    script = PREPARE + (
        "def die(stage, done, total):\n"
        "    if done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare(data, folder, die, batch_tokens=64, shard_tokens=256)\n"
    )
    result = run_python(script, *two_files, tmp_path / "corpus")
    assert result.returncode == -signal.SIGKILL
    left = {path.suffix for path in (tmp_path / "corpus").iterdir()}
    assert left == {".lock", ".work"}
    again = prepare(two_parts(two_files), tmp_path / "corpus", batch_tokens=64, shard_tokens=256)
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == [again.key]
    assert again == prepare(two_parts(two_files), tmp_path / "fresh", batch_tokens=64, shard_tokens=256)


def test_a_full_disk_is_told_plainly(two_files, tmp_path):
    """When writing hits a limit, the message is about space, and no finished corpus is left."""
    script = PREPARE + (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\nprepare(data, folder)\n"
    )
    result = run_python(script, *two_files, tmp_path / "corpus")
    assert "StorageError" in result.stderr.strip().splitlines()[-2]
    assert "the disk is too small" in result.stderr
    assert list((tmp_path / "corpus").iterdir()) == []


def test_two_at_the_same_time_do_no_harm(two_files, tmp_path):
    """Two preparations that overlap both succeed, and leave one whole corpus."""
    barrier = threading.Barrier(2)
    results = []

    def meet(stage, done, total):
        if not done:
            barrier.wait(30)

    def work():
        results.append(prepare(two_parts(two_files), tmp_path / "corpus", meet))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results[0] == results[1]
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == [results[0].key]
    Corpus.open(tmp_path / "corpus" / results[0].key).verify()


def test_a_folder_without_its_marker_is_made_again(two_files, tmp_path):
    """A corpus whose marker is gone is not trusted: it is replaced."""
    corpus = prepared(tmp_path, two_parts(two_files))
    (corpus.folder / "corpus.json").unlink()
    (corpus.folder / corpus.info.train.shards[0].name).write_bytes(b"")
    assert prepare(two_parts(two_files), tmp_path) == corpus.info
    Corpus.open(corpus.folder).verify()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [corpus.info.key]


def take_in_child(corpus, ids, queue):
    """For a spawned process."""
    queue.put(corpus.train.take(ids))


def test_a_corpus_travels_to_other_processes(two_files, tmp_path):
    """A corpus that was already used can be handed to another process, which opens maps of its own."""
    corpus = prepared(tmp_path, two_parts(two_files))
    ids = np.array([5, 0, 5])
    expected = corpus.train.take(ids)
    assert len(pickle.dumps(corpus)) < 10_000
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=take_in_child, args=(corpus, ids, queue))
    process.start()
    assert np.array_equal(queue.get(timeout=60), expected)
    process.join(60)
    assert process.exitcode == 0


MEASURE_MEMORY = """
def peak_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))

sizes = dict(batch_tokens=1 << 16, shard_tokens=1 << 20)
data = data.model_copy(update={"seq_len": 128})
prepare(data.model_copy(update={"sources": [sys.argv[4]]}), folder + "-small", **sizes)
before = peak_mb()
prepare(data, folder, **sizes)
print(json.dumps([before, peak_mb()]))
"""


def write_large(path, rows):
    """About 4 kB a row, in the format of the suffix; a table has one row group, or batches of 500 rows."""
    text = "some text of a document, again and again. " * 100
    if path.suffix in (".parquet", ".arrow"):
        batches = [
            pa.record_batch({"text": [f"{row} {text}" for row in range(start, start + 500)]})
            for start in range(0, rows, 500)
        ]
        table = pa.Table.from_batches(batches)
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=rows, use_dictionary=False, compression="none")
            return
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"text": f"{row} {text}"}) + "\n")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".arrow"])
def test_memory_does_not_grow_with_the_corpus(two_files, tmp_path, suffix):
    """Preparing 40 MB takes no more memory than preparing 8 MB, but for a few megabytes of chance."""
    small, large = tmp_path / f"small{suffix}", tmp_path / f"large{suffix}"
    write_large(small, 2000)
    write_large(large, 10_000)
    result = run_python(PREPARE + MEASURE_MEMORY, large, two_files[1], tmp_path / "corpus", small)
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout)
    print(f"peak {before:.0f} -> {after:.0f} MB")
    assert after - before < 16
