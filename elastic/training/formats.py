"""Which files can be read, told from their suffix alone.

Text and source code (one document a file), JSON lines (one document a line), Parquet and Arrow tables
(one document a row). Text and JSON lines may be compressed with gzip or zstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "jsonl", "parquet", "arrow"]

PROSE_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", ".tex")
# fmt: off
CODE_SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java",
    ".kt", ".scala", ".swift", ".cs", ".m", ".mm", ".zig", ".nim", ".d", ".js", ".mjs", ".jsx", ".ts",
    ".tsx", ".vue", ".html", ".htm", ".css", ".scss", ".php", ".rb", ".pl", ".pm", ".lua", ".sh", ".bash",
    ".zsh", ".ps1", ".sql", ".r", ".jl", ".hs", ".ml", ".mli", ".fs", ".clj", ".lisp", ".scm", ".el", ".ex",
    ".exs", ".erl", ".dart", ".f90", ".f", ".asm", ".s", ".v", ".sv", ".vhd", ".proto", ".cmake",
)
# fmt: on
TEXT_SUFFIXES = frozenset(PROSE_SUFFIXES + CODE_SUFFIXES)
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
ARROW_SUFFIXES = frozenset({".arrow", ".feather", ".ipc"})
COMPRESSIONS: dict[str, Literal["gzip", "zstd"]] = {".gz": "gzip", ".zst": "zstd"}

SUPPORTED = (
    ".txt .md and other prose, source code (.py .c .cpp .rs .go .java .js .ts ...), .jsonl .ndjson "
    "(all of these also .gz or .zst), .parquet, .arrow .feather"
)


@dataclass(frozen=True)
class Format:
    """How the bytes of a file become documents."""

    kind: Kind
    compression: Literal["gzip", "zstd"] | None = None


def format_of(path: str) -> Format | None:
    """The format of `path`, or None when its suffix is not one we read."""
    stem, suffix = _split_suffix(path.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        _, suffix = _split_suffix(stem)
    kind: Kind | None = None
    if suffix in TEXT_SUFFIXES:
        kind = "text"
    elif suffix in JSONL_SUFFIXES:
        kind = "jsonl"
    elif compression is None and suffix in PARQUET_SUFFIXES:
        kind = "parquet"
    elif compression is None and suffix in ARROW_SUFFIXES:
        kind = "arrow"
    return Format(kind, compression) if kind else None


def advice_for(path: str) -> str:
    """What to do about a file whose format is not supported."""
    if ".json" in path.lower().rpartition("/")[2]:
        return "write one JSON object a line and name the file .jsonl"
    return f"use one of: {SUPPORTED}"


def _split_suffix(path: str) -> tuple[str, str]:
    """Like os.path.splitext, but for URLs as well."""
    folder, slash, name = path.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    if not stem:  # no dot, or only the leading one of a hidden name
        return path, ""
    return f"{folder}{slash}{stem}", dot + suffix
