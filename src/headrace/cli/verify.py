"""`headrace verify --kind KIND --task FILE --answer FILE`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import AsJson


class Kind(StrEnum):
    """Verifiers that need nothing but a task and an answer."""

    MATH = "math"
    EXACT = "exact"
    NUMERIC = "numeric"


def verify(
    kind: Annotated[Kind, typer.Option(help="Which verifier.")],
    task: Annotated[Path, typer.Option(help='JSON file with "answer", and "prompt" if you like.')],
    answer: Annotated[Path, typer.Option(help="Text file with the completion to score.")],
    *,
    as_json: AsJson = True,
) -> None:
    """Score one completion and print its Verdict as JSON, which is the only form it has."""
    del as_json
    from pydantic import TypeAdapter

    from headrace.config import ComponentConfig, VerifierConfig
    from headrace.errors import DataError
    from headrace.verifiers import check_answer, verify_completion

    fields = _read_task(task)
    component = TypeAdapter[ComponentConfig](ComponentConfig).validate_python({"kind": kind.value})
    problem = check_answer(component, fields["answer"])
    if problem is not None:
        msg = f"{task}: answer: {problem}"
        raise DataError(msg)
    verdict = asyncio.run(
        verify_completion(
            VerifierConfig(components={kind.value: component}),
            prompt=fields["prompt"],
            answer=fields["answer"],
            completion=_read(answer),
        )
    )
    typer.echo(json.dumps(asdict(verdict)))


def _read_task(path: Path) -> dict[str, str]:
    from headrace.errors import DataError

    try:
        fields = json.loads(_read(path))
    except json.JSONDecodeError as error:
        msg = f"{path}: line {error.lineno} is not JSON: {error.msg}"
        raise DataError(msg) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("answer"), str | int | float):
        msg = f'{path}: must be a JSON object with "answer" as text or a number'
        raise DataError(msg)
    return {"prompt": str(fields.get("prompt", "")), "answer": str(fields["answer"])}


def _read(path: Path) -> str:
    from headrace.errors import DataError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: {error}"
        raise DataError(msg) from error
