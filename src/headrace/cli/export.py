"""`headrace export RUN --output DIR`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportDtype(StrEnum):
    """Number formats that a model is written in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run (its last checkpoint), a checkpoint, or a PEFT adapter."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory to write; absent or without weights.")],
    base: Annotated[
        str | None, typer.Option(help="The adapter's model, where it is not where it was.")
    ] = None,
    dtype: Annotated[ExportDtype, typer.Option(help="Of the weights.")] = ExportDtype.FLOAT32,
) -> None:
    """Write the policy of a run as a Hugging Face model, an adapter merged into its weights."""
    from headrace.runtime.export import export_model
    from headrace.runtime.precision import named_dtype

    origin = export_model(source, output, named_dtype(dtype), base)
    typer.echo(f"{origin} -> {output.absolute()}")
