"""`headrace check RECIPE`."""

from __future__ import annotations

import json
import sys

import typer

from headrace.cli.options import AsJson, Overrides, Recipe


def check(recipe: Recipe, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """Find every fault of config, model, data, verifier and memory at once; exit 2 if any."""
    from headrace.config import check_config
    from headrace.errors import UserError, problems_of
    from headrace.recipes import find_recipe
    from headrace.runtime.preflight import preflight

    problems: list[str] = []
    notes: list[str] = []
    try:
        found = preflight(check_config(find_recipe(recipe), overrides or ()))
        problems, notes = found.problems, found.notes
    except UserError as error:
        problems = list(problems_of(error))
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "problems": problems, "notes": notes}))
    else:
        _print(recipe, problems, notes)
    if problems:
        sys.exit(2)


def _print(recipe: str, problems: list[str], notes: list[str]) -> None:
    for problem in problems:
        sys.stderr.write(f"error: {problem}\n")
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if not problems:
        typer.echo(f"{recipe}: nothing wrong was found")
