"""`headrace fetch MODEL`."""

from __future__ import annotations

from typing import Annotated

import typer


def fetch(
    model: Annotated[str, typer.Argument(help="Name of a model, such as smollm2-135m.")],
) -> None:
    """Bring a model into the cache, checksummed; what is there already is verified and kept."""
    from headrace.models.fetch import fetch_model

    path = fetch_model(model, progress=_say)
    typer.echo(str(path))


def _say(line: str) -> None:
    typer.echo(line, err=True)
