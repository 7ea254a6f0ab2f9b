"""`elastic config`: check a job and a fleet, show every value with its origin, print the JSON Schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from elastic.base.config import Fleet, Job
from elastic.base.configfile import load_both, load_job
from elastic.base.errors import EXIT_CONFIG, ConfigError
from elastic.base.overrides import split_overrides
from elastic.base.resolve import Origin, Resolved
from elastic.base.schema import value_text

config_app = typer.Typer(help="Check, show and describe job and fleet files.", no_args_is_help=True)

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides.")]
FleetFile = Annotated[Path | None, typer.Option("--fleet", metavar="FLEET", help="Fleet file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config_app.command()
def check(
    job: JobFile, overrides: Overrides = None, fleet: FleetFile = None, as_json: AsJson = False
) -> None:
    """List all mistakes of a job, and of a fleet with it; nothing is started."""
    try:
        _load(job, fleet, overrides or [])
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"ok": False, "problems": error.problems}, indent=2))
        raise typer.Exit(EXIT_CONFIG) from None
    if as_json:
        typer.echo(json.dumps({"ok": True, "problems": []}, indent=2))
    else:
        for path in filter(None, (job, fleet)):
            typer.echo(f"{path}: ok")


@config_app.command()
def show(job: JobFile, overrides: Overrides = None, fleet: FleetFile = None, as_json: AsJson = False) -> None:
    """Print every value that would be used, and where it comes from."""
    parts = _load(job, fleet, overrides or [])
    if as_json:
        origins = {name: {key: asdict(o) for key, o in part.origins.items()} for name, part in parts.items()}
        typer.echo(json.dumps(origins, indent=2))
        return
    for name, part in parts.items():
        typer.echo(f"{name} {part.value.name}")
        typer.echo("\n".join(_table(part.origins)) + "\n")


@config_app.command()
def schema(of: Annotated[Literal["job", "fleet"], typer.Argument(help="Which of the two.")] = "job") -> None:
    """Print the JSON Schema, for editors that complete and check YAML."""
    model = Job if of == "job" else Fleet
    typer.echo(json.dumps(model.model_json_schema(), indent=2))


def _load(job: Path, fleet: Path | None, overrides: list[str]) -> dict[str, Resolved[Any]]:
    if fleet is not None:
        both = load_both(job, fleet, overrides)
        return {"job": both[0], "fleet": both[1]}
    of_job, of_fleet = split_overrides(overrides)
    if of_fleet:
        raise ConfigError([f"override '{each}': give the fleet with --fleet" for each in of_fleet])
    return {"job": load_job(job, of_job)}


def _table(origins: dict[str, Origin]) -> list[str]:
    rows = [(key, _shown(origin.value), origin) for key, origin in origins.items()]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return [
        f"  {key:<{key_width}}  {value:<{value_width}}  {o.source:<8}  {o.why or o.position}".rstrip()
        for key, value, o in rows
    ]


def _shown(value: object) -> str:
    return "-" if value is None else value_text(value)
