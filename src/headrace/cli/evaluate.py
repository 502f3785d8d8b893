"""`headrace eval RECIPE --model DIR`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import AsJson, Overrides, Recipe


def evaluate(
    recipe: Recipe,
    model: Annotated[
        str, typer.Option(help="A model directory, a checkpoint's hf directory, or a name.")
    ],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write every rollout to this Parquet file.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Measure pass@1 and pass@k of a model on the recipe's held-out prompts."""
    from headrace.config import check_config
    from headrace.recipes import find_recipe
    from headrace.runtime.evaluation import evaluate_model
    from headrace.runtime.preflight import preflight

    settings = [*(overrides or ()), f"model.path={json.dumps(model)}"]
    prepared = preflight(check_config(find_recipe(recipe), settings)).require()
    result = asyncio.run(evaluate_model(prepared, output))
    if as_json:
        typer.echo(json.dumps({"metrics": result.metrics, "sampling": result.sampling}))
        return
    for name, value in result.metrics.items():
        typer.echo(f"{name:44} {value:.4f}")
