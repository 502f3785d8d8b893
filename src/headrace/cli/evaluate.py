"""`headrace eval RECIPE --model DIR`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import AsJson, Overrides, Recipe
from headrace.errors import ConfigError, RunError

if TYPE_CHECKING:
    from headrace.runtime.evaluation import EvaluationResult


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
    from headrace.runtime.preflight import preflight

    _check_output(output)
    settings = [*(overrides or ()), f"model.path={_from_here(model)}"]
    found = preflight(check_config(find_recipe(recipe), settings))
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
    prepared = found.require()

    from headrace.runtime.evaluation import evaluate_model

    result = asyncio.run(evaluate_model(prepared))
    if as_json:
        typer.echo(json.dumps({"metrics": result.metrics, "sampling": result.sampling}))
    else:
        for name, value in result.metrics.items():
            typer.echo(f"{name:44} {value:.4f}")
    if output is not None:
        _write(output, result)


def _check_output(output: Path | None) -> None:
    if output is not None and not output.parent.is_dir():
        msg = f"--output {output}: no directory {output.parent}; make it, or give another"
        raise ConfigError(msg)
    if output is not None and output.is_dir():
        msg = f"--output {output}: is a directory; give the name of a file in it"
        raise ConfigError(msg)


def _from_here(model: str) -> str:
    """Return the TOML of ``model``: on a command line a path starts where the command is given."""
    from headrace.models.catalogue import BUNDLED, FETCHABLE

    path = Path(model).expanduser()
    is_path = model not in BUNDLED and model not in FETCHABLE and path.is_dir()
    return json.dumps(str(path.absolute()) if is_path else model, ensure_ascii=False)


def _write(output: Path, result: EvaluationResult) -> None:
    from headrace.monitors import write_rollouts

    try:
        write_rollouts(output, result.groups)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        msg = f"{output} cannot be written: {reason}; free space, or give another --output"
        raise RunError(msg) from error
