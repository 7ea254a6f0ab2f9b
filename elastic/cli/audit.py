"""`elastic audit`: the promises of a run, checked from its run folder alone."""

from __future__ import annotations

import json as jsonlib
import textwrap

from elastic.base.errors import EXIT_BUG
from elastic.state.audit import Audit, audit
from elastic.state.storage import Storage

WIDTH = 110


def audit_command(run: str, *, json: bool = False) -> None:
    """Print one line per promise; exit code 1 if one is broken."""
    found = audit(Storage(run))
    print(jsonlib.dumps(found.to_json(), indent=2) if json else "\n".join(audit_text(found)))
    if not found.ok:
        raise SystemExit(EXIT_BUG)


def audit_text(found: Audit) -> list[str]:
    """The table of checks; a failure's reason is wrapped, never cut."""
    width = max(len(check.name) for check in found.checks)
    lines: list[str] = []
    for check in found.checks:
        head = f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  "
        wrapped = textwrap.wrap(
            check.detail, WIDTH - len(head), break_long_words=False, break_on_hyphens=False
        )
        lines += [head + (wrapped or [""])[0], *(" " * len(head) + line for line in wrapped[1:])]
    broken = sum(not check.ok for check in found.checks)
    lines.append(
        f"{found.url}: {f'{broken} of {len(found.checks)} checks failed' if broken else 'all checks passed'}"
    )
    return lines
