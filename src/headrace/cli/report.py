"""`headrace report RUN`."""

from __future__ import annotations

import json
import webbrowser
from typing import Annotated

import typer

from headrace.cli.options import AsJson, RunPath


def report(
    run: RunPath,
    *,
    as_json: AsJson = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the run's report.html: one self-contained page with plots and rollouts."""
    from headrace.monitors import summarise, write_report

    path = write_report(run)
    if as_json:
        typer.echo(json.dumps(summarise(run)))
    else:
        typer.echo(f"report: {path.absolute()}")
    if show:
        webbrowser.open(path.absolute().as_uri())
