"""Write docs/reference/job.md and fleet.md from the configuration models; with --check, only compare."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # runs without an installation too

from elastic.base.config import Fleet, Job
from elastic.base.presets import DERIVED, PRESETS
from elastic.base.schema import describe

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
NOTE = "<!-- Written by `make docs` from elastic/base/config.py: change that, not this. -->"

JOB_INTRO = """\
A job says what to train. It is a YAML file; `key=value` overrides on the command line win over the file,
the file wins over the defaults, and nothing else is looked at. `elastic config check JOB` lists all mistakes,
`elastic config show JOB` prints every value and its origin, `elastic config schema job` the JSON Schema for
editors.

A default of `null` with *Derived* in the text is filled in from other values; otherwise `null` means off.
Keys of a section with several kinds name their kind in brackets; the default kind may be left out."""

FLEET_INTRO = """\
A fleet says where to train. It is a YAML file given with `--fleet`; overrides of it begin with `fleet.`, and
an island goes by its name or its position: `fleet.islands.us.workers=[1,4]`. `elastic config show JOB
--fleet FLEET` prints every value and its origin, `elastic config schema fleet` the JSON Schema.

`workers: 2` is short for exactly two workers, `workers: [1, 4]` for one to four."""


def page(title: str, intro: str, model: type[Job] | type[Fleet]) -> str:
    """One reference page: introduction, then a table of all keys."""
    lines = [NOTE, "", f"# {title}", "", intro, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field in describe(model):
        default = {None: "required", "": ""}.get(field.default, f"`{_cell(field.default or '')}`")
        lines.append(f"| `{field.key}` | {_cell(field.type)} | {default} | {_cell(field.text)} |")
    return "\n".join(lines) + "\n"


def presets() -> str:
    """What each outer preset stands for."""
    lines = ["", "## Outer presets", "", "A preset fills the fields of `outer` that are left out.", ""]
    names = list(PRESETS)
    lines += [f"| | {' | '.join(f'`{name}`' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for field in DERIVED:
        cells = [
            "-" if field in preset.unused else f"{getattr(preset, field)}" for preset in PRESETS.values()
        ]
        lines.append(f"| `{field}` | {' | '.join(cells)} |")
    lines += [f"| from | {' | '.join(preset.source for preset in PRESETS.values())} |", ""]
    for name, preset in PRESETS.items():
        if preset.layers_per_fragment:
            lines.append(
                f"`{name}`: one fragment per {preset.layers_per_fragment} layers of our decoder; "
                f"{preset.fragments} fragments of another model, at most one a layer."
            )
    for name, preset in PRESETS.items():
        if preset.unused:
            keys = ", ".join(f"`outer.{field}`" for field in preset.unused)
            lines += ["", f"Under `{name}` these have no effect and are refused: {keys}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or compare the pages; 1 if --check finds one that is not current."""
    pages = {
        FOLDER / "job.md": page("Job", JOB_INTRO, Job) + presets(),
        FOLDER / "fleet.md": page("Fleet", FLEET_INTRO, Fleet),
    }
    if "--check" not in sys.argv[1:]:
        FOLDER.mkdir(parents=True, exist_ok=True)
        for path, text in pages.items():
            path.write_text(text, "utf-8")
        return 0
    old = [path.name for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
    if old:
        print(f"docs/reference is not current: {', '.join(old)}; run make docs", file=sys.stderr)
    return int(bool(old))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
