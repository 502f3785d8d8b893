"""`headrace fetch MODEL`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def fetch(model: Annotated[str, typer.Argument(help="Name of a model, such as smollm2-135m.")]) -> None:
    """Bring a model into the cache, checksummed; what is there already is verified and kept."""
    from headrace.models.fetch import fetch_model

    path = fetch_model(model, progress=lambda line: sys.stderr.write(f"{line}\n"))
    typer.echo(str(path))
