"""The command `elastic`: its verbs, and how an error becomes an exit code.

A verb's work lies in its own module and is imported when the verb is used, so that reading a configuration
needs neither torch nor ray. An `ElasticError` is printed without a traceback; a traceback means a bug.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from elastic import __version__
from elastic.base.errors import EXIT_BUG, EXIT_SIGINT, ConfigError, ElasticError
from elastic.cli.config import config_app

EXIT_CODES = "\n\n".join(
    (
        "Exit codes:",
        "0 done",
        "1 a bug (the traceback is printed last), or a check of audit or doctor that failed",
        "2 the command, the configuration or the data is wrong; do not retry",
        "3 the cluster can never hold what was asked for",
        "75 stopped; the same command goes on",
        "130, 143 stopped by ctrl-C or SIGTERM; the same command goes on",
    )
)
DEFAULT_FLEET = Path("cluster_configs/local.yaml")

app = typer.Typer(
    name="elastic",
    help="Train one model across many clusters.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_app, name="config")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file, as jobs/quickstart.yaml.")]
RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Run folder: a path or a URL.")]
FleetFile = Annotated[
    Path | None, typer.Option("--fleet", metavar="FLEET", help=f"Fleet file (default: {DEFAULT_FLEET}).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides: inner.lr=3e-4, fleet.islands.us.workers=2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastic {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(job: JobFile, overrides: Overrides = None, fleet: FleetFile = None, json: Json = False) -> None:
    """Train, or go on with a run that was stopped."""
    fleet = fleet or _default_fleet()
    from elastic.cli.train import train_command

    train_command(job, fleet, overrides or [], json=json)


@app.command()
def status(
    run: RunFolder,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and show what changes.")] = False,
    json: Json = False,
) -> None:
    """Say how a run is doing, from its run folder alone."""
    from elastic.cli.status import status_command

    status_command(run, watch=watch, json=json)


@app.command()
def replay(
    scenario: Annotated[str, typer.Argument(help="Scenario file (tests/golden/README.md).")],
    check: Annotated[bool, typer.Option(help="Compare with the scenario's own figures.")] = False,
) -> None:
    """Run a scripted scenario of the outer loop, without Ray, and print what came out."""
    from elastic.cli.replay import replay_command

    replay_command(scenario, check=check)


@app.command()
def audit(run: RunFolder, json: Json = False) -> None:
    """Check what a run promises about its data and its files."""
    from elastic.cli.audit import audit_command

    audit_command(run, json=json)


@app.command()
def report(run: RunFolder, json: Json = False) -> None:
    """Write figures and tables of a run into its report folder."""
    from elastic.cli.report import report_command

    report_command(run, json=json)


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="New folder to write.")],
    json: Json = False,
) -> None:
    """Write the trained model as a Hugging Face folder."""
    from elastic.cli.export import export_command

    export_command(run, folder, json=json)


@app.command()
def doctor(fleet: FleetFile = None, json: Json = False) -> None:
    """Look for what would keep a run from working here."""
    from elastic.cli.doctor import doctor_command

    doctor_command(fleet or (DEFAULT_FLEET if DEFAULT_FLEET.is_file() else None), json=json)


def main() -> None:
    """Run the command line and exit with the code that the outcome has."""
    try:
        app(prog_name="elastic")  # ends in SystemExit, also for wrong usage (2)
    except ElasticError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_SIGINT)
    except BrokenPipeError:  # the reader, as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception:
        sys.stdout.flush()
        traceback.print_exc()
        sys.exit(EXIT_BUG)


def _default_fleet() -> Path:
    if DEFAULT_FLEET.is_file():
        return DEFAULT_FLEET
    raise ConfigError([f"no fleet: give --fleet FLEET ({DEFAULT_FLEET} is not in {Path.cwd()})"])
