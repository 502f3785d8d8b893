"""`headrace train RECIPE`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, assert_never

import typer

from headrace.cli.options import Overrides, Recipe

if TYPE_CHECKING:
    from headrace.controller import RunOutcome
    from headrace.runtime.places import Places
    from headrace.runtime.preflight import PreparedRun


class RuntimeName(StrEnum):
    """Runtimes there are."""

    LOCAL = "local"
    RAY = "ray"


OutputOption = Annotated[
    Path | None,
    typer.Option(help="Directory of the run [default: runs/NAME, or the next free NAME-2 ...]."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
RestartsOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Start again and resume up to N times in a row when the run's process is killed.",
    ),
]
RuntimeOption = Annotated[
    RuntimeName, typer.Option(help="Where generators and verifiers run: here, or on Ray.")
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray's head, or \"auto\" [default: a Ray of this run's own, on this machine].",
    ),
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Machines of the cluster to wait for.")
]


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    output: OutputOption = None,
    *,
    resume: ResumeOption = False,
    restarts: RestartsOption = 0,
    runtime: RuntimeOption = RuntimeName.LOCAL,
    address: AddressOption = None,
    nodes: NodesOption = None,
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

    # Whose address is given has the devices, and says below how many.
    found = preflight(checked, ranks_are_here=address is None)
    for note in found.notes:
        sys.stderr.write(f"note: {note}\n")
    prepared = found.require()
    directory = output or _default_directory(prepared.config.name, resume=resume)

    from headrace.runtime.interrupts import run_interruptibly
    from headrace.runtime.local import LocalRun

    with _places(runtime, prepared, directory, address, nodes) as places:
        run = LocalRun(
            prepared=prepared,
            output=directory,
            resume=resume,
            is_restart=is_restart,
            places=places,
        )
        outcome = run_interruptibly(run)
    where = _placing(runtime, address, nodes)
    how_to_resume = _how_to_resume(recipe, directory, overrides, where)
    _say_how_it_ended(outcome, directory, how_to_resume)


def _placing(runtime: RuntimeName, address: str | None, nodes: int | None) -> list[str]:
    """Return the options that say where a run is, as they were given."""
    words = [] if runtime is RuntimeName.LOCAL else ["--runtime", str(runtime)]
    words += [] if address is None else ["--address", address]
    return words + ([] if nodes is None else ["--nodes", str(nodes)])


@contextmanager
def _places(
    runtime: RuntimeName,
    prepared: PreparedRun,
    directory: Path,
    address: str | None,
    nodes: int | None,
) -> Iterator[Places]:
    from headrace.errors import ClusterError
    from headrace.runtime.generator_room import require_room
    from headrace.runtime.places import LocalPlaces

    match runtime:
        case RuntimeName.LOCAL:
            for option, value in (("--address", address), ("--nodes", nodes)):
                if value is not None:
                    msg = f"{option} {value}: is of a Ray cluster; add --runtime ray"
                    raise ClusterError(msg)
            require_room(prepared.config, prepared.model)
            yield LocalPlaces()
        case RuntimeName.RAY:
            from headrace.runtime.ray.begin import places_on_ray

            with places_on_ray(prepared, directory, address, nodes) as places:
                yield places
        case _:
            assert_never(runtime)


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


def _say_how_it_ended(outcome: RunOutcome | None, directory: Path, how_to_resume: str) -> None:
    if outcome is None:
        sys.stderr.write(f"stopped at once; {how_to_resume}\n")
        sys.exit(130)
    if outcome.stopped_early:
        kept = ", checkpoint written" if outcome.num_steps_done else ", before the first one"
        typer.echo(f"stopped after step {outcome.num_steps_done}{kept}; {how_to_resume}")
    else:
        typer.echo(f"done: {outcome.num_steps_done} steps, policy version {outcome.policy_version}")
    typer.echo(f"report: {(directory / 'report.html').absolute()}")


def _how_to_resume(
    recipe: str, directory: Path, overrides: list[str] | None, on_ray: Sequence[str] = ()
) -> str:
    settings = [word for override in overrides or () for word in ("--set", override)]
    where = ["--output", str(directory), *on_ray, "--resume"]
    command = ["headrace", "train", recipe, *settings, *where]
    return f"go on with: {shlex.join(command)}"
