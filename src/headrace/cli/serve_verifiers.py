"""`headrace serve-verifiers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Overrides

if TYPE_CHECKING:
    from headrace.config import SandboxConfig


def serve_verifiers(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Isolate as the [verifier.sandbox] of this recipe says."),
    ] = None,
    overrides: Overrides = None,
    *,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8700,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token clients must give.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds it.")
    ] = None,
    max_queued: Annotated[
        int, typer.Option(min=1, help="Jobs that wait; more are turned away.")
    ] = 256,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="For what runs when this is told to end.")
    ] = 60,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file; with it the address speaks HTTPS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
) -> None:
    """Run programs in isolation for runs on other machines, until SIGTERM or Ctrl-C."""
    _require_packages()
    from headrace.verifiers.remote.desk import DeskLimits
    from headrace.verifiers.remote.serving import ServeOptions, read_token, serve
    from headrace.verifiers.sandbox.tiers import build_executor

    token = read_token(file=token_file, variable=token_env, environ=os.environ)
    executor = build_executor(_sandbox(recipe, overrides))
    options = ServeOptions(
        host=host,
        port=port,
        token=token,
        limits=DeskLimits(num_slots=executor.num_cells, max_queued=max_queued),
        drain_seconds=drain_seconds,
        certificate=certificate,
        key=key,
        on_ready=lambda url: typer.echo(f"serving {url}, isolated by {executor.tier}", err=True),
    )
    serve(executor, executor.tier, options)


def _require_packages() -> None:
    """Raise UserError where the extra is not installed."""
    import importlib.util

    from headrace.errors import UserError

    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        msg = (
            "serve-verifiers needs fastapi and uvicorn: pip install -c constraints.txt -e "
            "'.[serve]' in the source folder"
        )
        raise UserError(msg)


def _sandbox(recipe: str | None, overrides: list[str] | None) -> SandboxConfig:
    """Return how to isolate. Raises ConfigError for a recipe with faults."""
    from headrace.config import SandboxConfig, check_config
    from headrace.errors import ConfigError
    from headrace.recipes import find_recipe

    if recipe is None:
        if overrides:
            msg = "--set: there is no recipe to override; name one"
            raise ConfigError(msg)
        return SandboxConfig()
    return check_config(find_recipe(recipe), overrides or ()).require().verifier.sandbox
