"""Where a process finds the tokenised corpus: in the cache, or made anew from the same sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elastic.base.config import Data
from elastic.base.errors import DataError
from elastic.training.corpus import Corpus, prepare

Progress = Callable[[str, int, int], None]


def cache_path(cache_folder: str) -> str:
    """An absolute path as this process sees it; a home folder stays `~`, since every node has its own."""
    return cache_folder if cache_folder.startswith("~") else str(Path(cache_folder).absolute())


def open_corpus(
    data: Data, cache: str, key: str = "", manifest: str = "", progress: Progress = lambda *_: None
) -> Corpus:
    """The corpus `key` in the cache, or, if it is not there, one that is tokenised now.

    `manifest`: hash of the sources' content that the run is bound to. Raises DataError if the sources
    now hold something else.
    """
    folder = Path(cache).expanduser()
    if key and (folder / key).is_dir():
        return Corpus.open(folder / key)
    info = prepare(data, folder, progress)
    if manifest and info.manifest_hash != manifest:
        raise DataError(
            "the sources have changed since the run began, and its tokenised copy is gone",
            where=str(folder),
            saw=f"manifest {info.manifest_hash[:12]}, the run has {manifest[:12]}",
            fix="restore the sources or the cache, or begin a new run (init_from takes over the weights)",
        )
    return Corpus.open(folder / info.key)
