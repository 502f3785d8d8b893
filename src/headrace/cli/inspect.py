"""`headrace inspect RUN`."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import RunPath


def inspect(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="The step [default: the last written].")] = None,
    group: Annotated[str | None, typer.Option(help="One group of it, by its id.")] = None,
) -> None:
    """Show rollouts: text, tokens, versions, log-probs and verdicts."""
    from rich.console import Console

    from headrace.models.catalogue import resolve_model
    from headrace.models.tokenizer import Tokenizer
    from headrace.monitors import inspect_view, read_run

    tokenizer = Tokenizer.load(resolve_model(read_run(run).config["model"]["path"]))

    def token_text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special=False)

    view = inspect_view(run, step=step, group_id=group, token_text=token_text)
    Console().print(view)
