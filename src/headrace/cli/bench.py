"""`headrace bench NAME`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headrace.cli.options import AsJson


def bench(
    name: Annotated[str, typer.Argument(help="Which measurement; `list` names them all.")],
    against: Annotated[
        str | None, typer.Option(help="Peers to measure in the same run, such as trl, or hf,vllm.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="Parts to measure alone, such as sandbox, or sandbox,math.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Measure something on this machine and print its figures."""
    from headrace.bench import BENCHMARKS, run_benchmark

    if name == "list":
        for known, benchmark in BENCHMARKS.items():
            typer.echo(f"{known:12} {benchmark.summary}")
        return
    result = run_benchmark(name, against, progress=_say, parts=part)
    typer.echo(json.dumps(result.to_json()) if as_json else result.table())


def _say(line: str) -> None:
    typer.echo(line, err=True)
