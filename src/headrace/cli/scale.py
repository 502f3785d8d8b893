"""`headrace scale RUN generators=N verifiers=M`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import RunPath
from headrace.errors import ConfigError


def scale(
    run: RunPath,
    wanted: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="How many of it there are to be.")
    ],
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait until it has happened.")
    ] = 600.0,
) -> None:
    """Grow or shrink a run while it goes on; returns once it has.

    Generators come and go without a rollout being lost: what those that go had begun goes on at
    the others. Verifiers are the processes and cells of each component that has some; those that
    go answer first what they were given. Several roles change together or not at all.
    """
    from headrace.runtime.scaling import scale_run

    pairs = [_pair(text) for text in wanted]
    if len(dict(pairs)) < len(pairs):
        msg = f"{' '.join(wanted)}: name each role once"
        raise ConfigError(msg)
    typer.echo(scale_run(run, dict(pairs), deadline_seconds=timeout))


def _pair(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    try:
        return role, int(number)
    except ValueError:
        msg = f"{text}: give a role and a whole number, as in generators=4"
        raise ConfigError(msg) from None
