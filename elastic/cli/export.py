"""`elastic export`: the trained model as a folder that `transformers` loads."""

from __future__ import annotations

import json as jsonlib

from elastic.state.export import Exported, export_run
from elastic.state.storage import Storage


def export_command(run: str, directory: str, *, json: bool = False) -> None:
    """Write the folder and say what is in it."""
    exported = export_run(Storage(run), directory)
    print(jsonlib.dumps(exported.to_json(), indent=2) if json else "\n".join(export_text(exported)))


def export_text(exported: Exported) -> list[str]:
    """What was written, and how to load it."""
    count = f"{exported.num_parameters:,}".replace(",", " ")
    lines = [f"{exported.directory}: version {exported.version} of run {exported.run}, {count} parameters"]
    lines += [f"  {name}" for name in exported.files]
    lines += [f"note: {note}" for note in exported.notes]
    if exported.loads_in_transformers:
        lines.append(f"load it: transformers.AutoModelForCausalLM.from_pretrained({exported.directory!r})")
    return lines
