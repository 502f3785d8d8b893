"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override one setting; may be given many times."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")]
