"""`headrace`: the verbs, and the one place where an error becomes an exit status.

0 success, 1 the run failed, 2 the user can fix it. Errors go to standard error, one line for each
thing to fix; with ``--json`` standard output holds exactly one JSON object and nothing else.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headrace import __version__
from headrace.cli import (
    bench,
    check,
    doctor,
    evaluate,
    export,
    fetch,
    inspect,
    replay,
    report,
    scale,
    serve_verifiers,
    train,
    verify,
)
from headrace.errors import HeadraceError, UserError, problems_of

app = typer.Typer(
    name="headrace",
    help="Post-train language models with reinforcement learning: generate, score, update.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(*, show: bool) -> None:
    if show:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda show: _version(show=show),
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    del version


app.command("train")(train.train)
app.command("check")(check.check)
app.command("eval")(evaluate.evaluate)
app.command("report")(report.report)
app.command("inspect")(inspect.inspect)
app.command("replay")(replay.replay)
app.command("verify")(verify.verify)
app.command("serve-verifiers")(serve_verifiers.serve_verifiers)
app.command("scale")(scale.scale)
app.command("bench")(bench.bench)
app.command("export")(export.export)
app.command("fetch")(fetch.fetch)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        app()
    except UserError as error:
        for problem in problems_of(error):
            sys.stderr.write(f"error: {problem}\n")
        sys.exit(2)
    except HeadraceError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
