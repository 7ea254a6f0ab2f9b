from __future__ import annotations

import os
import sys
import sysconfig

import fsspec
import pytest

from elastic.base.errors import DataError
from elastic.training.formats import CODE_SUFFIXES, SUPPORTED, Format, format_of
from elastic.training.sources import list_files

pytestmark = pytest.mark.unit


def write(folder, *names):
    """Small files; a name that ends in / is a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")


def names_of(listing, folder):
    """Names below a folder."""
    return [os.path.relpath(file.name, folder) for file in listing.files]


def ignored_of(listing, folder):
    """reason -> names below a folder."""
    return {
        reason: [os.path.relpath(name, folder) + "/" * name.endswith("/") for name in ignored.names]
        for reason, ignored in listing.ignored.items()
    }


def test_builtin_stdlib_is_portable():
    """The standard library is listed by relative names, sorted, without what other machines may lack."""
    files = list_files(["builtin:stdlib"]).files
    names = [file.name for file in files]
    assert names == sorted(names)
    assert "builtin:stdlib/asyncio/base_events.py" in names
    assert all(name.startswith("builtin:stdlib/") and name.endswith(".py") for name in names)
    left_out = ("test", "idlelib", "ensurepip", "site-packages", "__pycache__", "tkinter", "lib2to3")
    assert not any(part in left_out for name in names for part in name.split("/"))
    assert not any("sysconfigdata" in name or sysconfig.get_path("stdlib") in name for name in names)
    assert sum(file.size_bytes for file in files) > 8_000_000


def test_unknown_builtin_is_refused():
    """Another built-in name is an error that names the one there is."""
    with pytest.raises(DataError, match=r"builtin:stdlib$"):
        list_files(["builtin:shakespeare"])


def test_folders_are_read_in_the_order_of_names(tmp_path):
    """Folders are listed recursively and sorted, whatever order the file system gives."""
    write(tmp_path, "part-10.txt", "part-2.txt", "b/x.py", "a/z.md", "C.TXT")
    listing = list_files([str(tmp_path)])
    assert names_of(listing, tmp_path) == ["C.TXT", "a/z.md", "b/x.py", "part-10.txt", "part-2.txt"]
    assert [file.split_key for file in listing.files] == names_of(listing, tmp_path)


def test_what_is_left_out_is_named(tmp_path):
    """Hidden names, unknown suffixes, broken links and FIFOs are counted and listed, not read."""
    write(
        tmp_path,
        "a.txt",
        "_SUCCESS",
        "_v=1/b.txt",
        ".hidden.txt",
        "x.csv",
        "y.json",
        "README",
        "_part.parquet",
    )
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    listing = list_files([str(tmp_path)])
    assert names_of(listing, tmp_path) == ["a.txt"]
    assert ignored_of(listing, tmp_path) == {
        "the name begins with _ or .": [".hidden.txt", "_SUCCESS", "_part.parquet", "_v=1/"],
        "unknown suffix": ["README", "x.csv", "y.json"],
        "a broken link": ["gone.txt"],
        "a link back to a folder above": ["loop/"],
        "not a regular file": ["pipe.txt"],
    }


def test_long_lists_of_left_out_names_stay_short(tmp_path):
    """All left-out names are counted, the first hundred are kept."""
    write(tmp_path, "a.txt", *[f"_{number:03d}.txt" for number in range(150)])
    (ignored,) = list_files([str(tmp_path)]).ignored.values()
    assert (ignored.count, len(ignored.names)) == (150, 100)


def test_links_are_followed(tmp_path):
    """Linked files and folders are read under the name of the link, with the size of what they point to."""
    write(tmp_path / "real", "a.txt", "sub/b.txt")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link.txt").symlink_to(tmp_path / "real/a.txt")
    (tmp_path / "data/folder").symlink_to(tmp_path / "real/sub")
    listing = list_files([str(tmp_path / "data")])
    assert names_of(listing, tmp_path / "data") == ["folder/b.txt", "link.txt"]
    assert [file.size_bytes for file in listing.files] == [len("text of sub/b.txt\n"), len("text of a.txt\n")]
    assert [file.change() for file in listing.files] == ["", ""]


@pytest.mark.parametrize("name", ["_part.txt", ".hidden.md", "_v/x.py"])
def test_explicit_names_are_always_read(tmp_path, name):
    """A file or folder that the user names is read, whatever its name begins with."""
    write(tmp_path, name)
    assert names_of(list_files([str(tmp_path / name)]), tmp_path) == [name]
    assert names_of(list_files([str(tmp_path / name.split("/")[0])]), tmp_path) == [name]


@pytest.mark.parametrize(
    ("name", "advice"), [("x.csv", ".jsonl"), ("x.json", "one JSON object a line"), ("README", ".parquet")]
)
def test_explicit_files_of_unknown_kind_are_refused(tmp_path, name, advice):
    """A named file that cannot be read is an error that says what can be."""
    write(tmp_path, name)
    with pytest.raises(DataError, match=name) as caught:
        list_files([str(tmp_path / name)])
    assert advice in caught.value.fix


def test_a_named_fifo_is_refused(tmp_path):
    """A FIFO would block for ever, so it is refused before it is opened."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="not a regular file"):
        list_files([str(tmp_path / "pipe.txt")])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.md", ["c.md"]),
        ("[ac].*", ["a.txt", "c.md"]),
        ("sub/*", ["sub/deep/e.txt", "sub/deep/f.md", "sub/d.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/d.txt", "sub/deep/e.txt"]),
        ("sub/**", ["sub/d.txt", "sub/deep/e.txt", "sub/deep/f.md"]),
        ("s*b/de*/*.md", ["sub/deep/f.md"]),
        ("_*", ["_x.txt"]),
    ],
)
def test_globs(tmp_path, pattern, expected):
    """`*`, `?`, `[..]` and `**` do what shells do; a matched folder is read whole."""
    write(
        tmp_path, "a.txt", "b.txt", "c.md", "_x.txt", "sub/d.txt", "sub/deep/e.txt", "sub/deep/f.md", ".g.txt"
    )
    assert names_of(list_files([str(tmp_path / pattern)]), tmp_path) == sorted(expected)


def test_globs_name_what_they_leave_out(tmp_path):
    """Hidden names and unknown suffixes under a glob are listed as well."""
    write(tmp_path, "a.txt", "_b.txt", "c.csv")
    listing = list_files([f"{tmp_path}/*"])
    assert ignored_of(listing, tmp_path) == {
        "the name begins with _ or .": ["_b.txt"],
        "unknown suffix": ["c.csv"],
    }


@pytest.mark.parametrize(
    "source", ["run[1]", "run[1]/*.txt", "run[1]/a.txt", "ru?/a.txt", "star*", "star*/*", "run[[]1]"]
)
def test_an_existing_name_wins_over_a_pattern(tmp_path, source):
    """Brackets, stars and question marks in existing names are letters; the neighbours are not read."""
    write(
        tmp_path,
        "run[1]/a.txt",
        "run1/wrong.txt",
        "ru?/a.txt",
        "run/a.txt",
        "star*/b.txt",
        "starfish/wrong.txt",
    )
    names = names_of(list_files([str(tmp_path / source)]), tmp_path)
    folder = "run[1]" if source.startswith("run") else source.split("/")[0]
    assert names == [f"{folder}/{'b' if folder == 'star*' else 'a'}.txt"]


def test_relative_names_stay_relative(tmp_path, monkeypatch):
    """Manifests say what the user wrote, so that two machines agree on it."""
    write(tmp_path, "texts/a.txt", "texts/b/c.txt")
    monkeypatch.chdir(tmp_path)
    for source in ("texts", "./texts/", "texts/**", "texts/*"):
        assert [file.name for file in list_files([source]).files] == ["texts/a.txt", "texts/b/c.txt"]
    assert [file.name for file in list_files(["texts/a.txt", "texts/b/*"]).files] == [
        "texts/a.txt",
        "texts/b/c.txt",
    ]


def test_a_file_of_two_sources_is_read_once(tmp_path):
    """A file that several sources hold, also through a link, is listed once and reported."""
    write(tmp_path, "a.txt", "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    listing = list_files([str(tmp_path), str(tmp_path / "a.txt"), f"{tmp_path}/*.txt"])
    assert names_of(listing, tmp_path) == ["a.txt", "b.txt"]
    assert len(listing.duplicates) == 1 + 1 + 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "no such file or folder"),
        ("a.txt/b.txt", "no such file or folder"),
        ("*.parquet", "matches nothing"),
        ("empty", "empty corpus.*an empty folder"),
        ("only_hidden", "empty corpus.*_x.txt"),
        ("only_hidden/*", "empty corpus.*_x.txt"),
        ("x" * 300, "no such file or folder"),
        ("ftpx://host/a.txt", "unknown kind of URL"),
        (" ", "a source is empty"),
    ],
)
def test_sources_without_files_are_errors(tmp_path, monkeypatch, source, message):
    """Each way to name nothing ends with exit code 2 and names the source and a fix."""
    write(tmp_path, "a.txt", "only_hidden/_x.txt")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        list_files([source])
    assert caught.value.exit_code == 2
    assert "data.sources" in caught.value.where
    assert caught.value.fix


def test_missing_packages_name_the_extra(monkeypatch):
    """s3:// without s3fs says which extra to install."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError) as caught:
        list_files(["s3://bucket/x.txt"])
    assert caught.value.fix == "pip install 'elastic-islands[s3]'"


def test_urls(request):
    """Folders, files and globs of any fsspec file system behave like local ones."""
    memory = fsspec.filesystem("memory")
    root = f"/{request.node.name}"
    for name in ("a.txt", "sub/b.jsonl", "_c.txt", "d.bin", "x[1]/e.txt"):
        memory.pipe(f"{root}/{name}", b"content")
    try:
        url = f"memory:/{root}"
        listing = list_files([url])
        assert [file.name for file in listing.files] == [
            f"{url}/a.txt",
            f"{url}/sub/b.jsonl",
            f"{url}/x[1]/e.txt",
        ]
        assert sorted(listing.ignored) == ["the name begins with _ or .", "unknown suffix"]
        assert [file.name for file in list_files([f"{url}/**/*.jsonl"]).files] == [f"{url}/sub/b.jsonl"]
        assert [file.name for file in list_files([f"{url}/x[1]"]).files] == [f"{url}/x[1]/e.txt"]
        (file,) = list_files([f"{url}/a.txt"]).files
        assert file.open().read() == b"content"
        assert file.change() == ""
        memory.pipe(f"{root}/a.txt", b"content2")
        assert file.change() == "size 7 -> 8 bytes"
        memory.rm(f"{root}/a.txt")
        assert file.change() == "missing"
    finally:
        memory.rm(root, recursive=True)


def test_a_rewritten_file_is_noticed(tmp_path):
    """Another size, another time at the same size, and a deletion are each told."""
    write(tmp_path, "a.txt")
    (file,) = list_files([str(tmp_path)]).files
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert "mtime" in file.change()
    (tmp_path / "a.txt").write_text("longer than before, by far")
    assert "size" in file.change()
    (tmp_path / "a.txt").unlink()
    assert file.change() == "missing"


def test_formats():
    """The suffix decides, in any case; only text and JSON lines may be compressed."""
    assert format_of("a/b.JSONL.GZ") == Format("jsonl", "gzip")
    assert format_of("s3://b/c.md.zst") == Format("text", "zstd")
    assert format_of("x.feather") == format_of("x.arrow") == Format("arrow")
    assert format_of("x.parquet") == Format("parquet")
    for name in ("x", "x.json", "x.gz", "x.parquet.gz", ".txt", "a.txt/b", "x.csv", "x.tar.zst"):
        assert format_of(name) is None, name
    assert all(format_of(f"x{suffix}") == Format("text") for suffix in CODE_SUFFIXES)
    assert ".jsonl" in SUPPORTED
