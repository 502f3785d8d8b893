"""`headrace train RECIPE`."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Overrides, Recipe

if TYPE_CHECKING:
    from headrace.controller import RunOutcome


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the run [default: runs/NAME, or the next free NAME-2 ...]."
        ),
    ] = None,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint.")
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Start again and resume up to N times in a row when the run's process is killed.",
        ),
    ] = 0,
) -> None:
    """Train to the end and write the report.

    Ctrl-C once finishes the step, writes a checkpoint and exits; twice stops at once, and the last
    checkpoint stays as it is.
    """
    from headrace.config import check_config
    from headrace.recipes import find_recipe

    checked = check_config(find_recipe(recipe), overrides or ())
    is_restart = False
    if restarts:
        from headrace.runtime.restarts import begin

        # Chosen before the fork: whoever resumes has to find it.
        output = output or _default_directory(checked.config.name, resume=resume)
        is_restart = begin(output, restarts=restarts)
        # Killed before it wrote its settings, it has left nothing to resume.
        resume = resume or (is_restart and (output / "config.json").is_file())

    from headrace.runtime.preflight import preflight

    found = preflight(checked)
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
    prepared = found.require()
    directory = output or _default_directory(prepared.config.name, resume=resume)

    from headrace.runtime.interrupts import run_interruptibly
    from headrace.runtime.local import LocalRun

    outcome = run_interruptibly(
        LocalRun(prepared=prepared, output=directory, resume=resume, is_restart=is_restart)
    )
    if outcome is None:
        sys.stderr.write(f"stopped at once; {_how_to_resume(recipe, directory, overrides)}\n")
        sys.exit(130)
    _say_how_it_ended(outcome, recipe, directory, overrides)


def _default_directory(name: str, *, resume: bool) -> Path:
    """Return the run of this name written last to resume, or the next free directory."""
    first = Path("runs") / name
    if resume:
        numbered = re.compile(re.escape(name) + r"(-[1-9][0-9]*)?")
        runs = [path for path in Path("runs").glob("*") if numbered.fullmatch(path.name)]
        return max(runs, key=_last_written, default=first)
    candidates = (first if n == 1 else first.with_name(f"{name}-{n}") for n in count(1))
    return next(path for path in candidates if not path.exists())


def _last_written(directory: Path) -> tuple[float, int, str]:
    """Return a sort key: when training last wrote in ``directory``, 0 if it never did."""
    files = [directory / name for name in ("config.json", "metrics.jsonl")]
    time = max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)
    return time, len(directory.name), directory.name


def _say_how_it_ended(
    outcome: RunOutcome, recipe: str, directory: Path, overrides: list[str] | None
) -> None:
    if outcome.stopped_early:
        kept = ", checkpoint written" if outcome.num_steps_done else ", before the first one"
        typer.echo(
            f"stopped after step {outcome.num_steps_done}{kept}; "
            f"{_how_to_resume(recipe, directory, overrides)}"
        )
    else:
        typer.echo(f"done: {outcome.num_steps_done} steps, policy version {outcome.policy_version}")
    typer.echo(f"report: {(directory / 'report.html').absolute()}")


def _how_to_resume(recipe: str, directory: Path, overrides: list[str] | None) -> str:
    settings = [word for override in overrides or () for word in ("--set", override)]
    command = ["headrace", "train", recipe, *settings, "--output", str(directory), "--resume"]
    return f"go on with: {shlex.join(command)}"
