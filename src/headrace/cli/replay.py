"""`headrace replay RUN --step N`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer

from headrace.cli.options import AsJson, RunPath


def replay(
    run: RunPath,
    step: Annotated[int, typer.Option(min=1, help="The step to make again.")],
    *,
    generate: Annotated[
        bool, typer.Option("--generate", help="Sample its groups again too, where that can be.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute a recorded step, and those before it from the last checkpoint on.

    Says whether every bit agrees, and otherwise what differs first. Exit status 1 if one differs.
    """
    from headrace.runtime.replay import replay as replayed

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    report = asyncio.run(replayed(run, step, tell, generate=generate))
    typer.echo(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    if not report.is_identical:
        raise typer.Exit(1)
