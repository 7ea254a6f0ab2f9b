"""`elastic report`: a page with loss curves, goodput and traffic of a run, written into its folder."""

from __future__ import annotations

import json as jsonlib

from elastic.state.storage import Storage
from elastic.views.report import write_report


def report_command(run: str, *, json: bool = False) -> None:
    """Write `report/` and print where it lies."""
    storage = Storage(run)
    names = [f"{storage.url}/{name}" for name in write_report(storage)]
    print(jsonlib.dumps({"files": names}, indent=2) if json else "\n".join(names))
