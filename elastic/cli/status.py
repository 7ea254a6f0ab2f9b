"""`elastic status`: how a run is doing, from its run folder alone, once or for as long as it runs."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable, Iterator

from elastic.state.storage import Storage
from elastic.views.status import RunStatus, StatusReader
from elastic.views.status_text import status_line, status_text

REFRESH_S = 2.0


def status_command(run: str, *, watch: bool = False, json: bool = False) -> None:
    """Print the status; with `watch` until the run ends. A status that could be read is exit code 0."""
    reader = StatusReader(Storage(run))
    if not watch:
        status = reader.read()
        print(_as_json(status, indent=2) if json else "\n".join(status_text(status)))
    elif not json and sys.stdout.isatty():
        _watch_terminal(reader)
    else:
        for status in changes(reader, time.sleep):
            print(_as_json(status, indent=None) if json else status_line(status), flush=True)


def changes(reader: StatusReader, sleep: Callable[[float], None]) -> Iterator[RunStatus]:
    """The status each time its line has changed, until the run is over."""
    last = ""
    while True:
        status = reader.read()
        line = status_line(status)
        if line != last:
            yield status
        if status.over:
            return
        last = line
        sleep(REFRESH_S)


def _watch_terminal(reader: StatusReader) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            status = reader.read()
            live.update(Text("\n".join(status_text(status))), refresh=True)
            if status.over:
                return
            time.sleep(REFRESH_S)


def _as_json(status: RunStatus, indent: int | None) -> str:
    return jsonlib.dumps(status.to_json(), indent=indent)
