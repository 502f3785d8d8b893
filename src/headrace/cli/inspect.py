"""`headrace inspect RUN`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import RunPath


def inspect(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="The step [default: the last written].")] = None,
    group: Annotated[str | None, typer.Option(help="One group of it, by its id.")] = None,
) -> None:
    """Show rollouts: text, tokens, versions, log-probs and verdicts."""
    from rich.console import Console

    from headrace.monitors import inspect_view

    Console().print(inspect_view(run, step, group))
