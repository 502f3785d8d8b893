"""`headrace verify --kind KIND --task FILE --answer FILE`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson

if TYPE_CHECKING:
    from headrace.config import VerifierConfig
    from headrace.types import Verdict


class Kind(StrEnum):
    """Verifiers that need nothing but a task and an answer."""

    MATH = "math"
    EXACT = "exact"
    NUMERIC = "numeric"
    CODE = "code"


def verify(
    kind: Annotated[Kind, typer.Option(help="Which verifier.")],
    task: Annotated[
        Path,
        typer.Option(
            help='JSON file with "answer", or for code with the columns of a row that hold its '
            'tests; "prompt", and settings in "verifier" and "sandbox", if you like.'
        ),
    ],
    answer: Annotated[Path, typer.Option(help="Text file with the completion to score.")],
    *,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say on standard error how the verdict came about.")
    ] = False,
    as_json: AsJson = True,
) -> None:
    """Score one completion and print its Verdict as JSON, which is the only form it has."""
    del as_json
    row = _read_row(task)
    config = _verifier(kind, row.pop("verifier", {}), row.pop("sandbox", {}), task)
    expected = None if kind is Kind.CODE else _expected(row, task)
    _check(config, kind, row, expected, task)
    verdict = asyncio.run(_verified(config, kind, row, expected, _read(answer), explain=explain))
    typer.echo(json.dumps(asdict(verdict)))


async def _verified(
    config: VerifierConfig,
    kind: Kind,
    row: dict[str, Any],
    expected: str | None,
    completion: str,
    *,
    explain: bool,
) -> Verdict:
    from headrace.verifiers import build_executor, explain_completion, runs_code, verify_completion

    executor = build_executor(config) if runs_code(config) else None
    if explain:
        for line in await explain_completion(
            config.components[kind.value],
            answer=expected,
            completion=completion,
            row=row,
            executor=executor,
        ):
            typer.echo(line, err=True)
    return await verify_completion(
        config,
        prompt=str(row.get("prompt", "")),
        answer=expected,
        completion=completion,
        metadata=row,
        executor=executor,
    )


def _verifier(kind: Kind, settings: object, sandbox: object, path: Path) -> VerifierConfig:
    """Return a verifier of one component. Raises DataError naming a setting that is wrong."""
    from pydantic import ValidationError

    from headrace.config import VerifierConfig
    from headrace.errors import DataError

    if not isinstance(settings, dict):
        msg = f'{path}: "verifier" must be an object with settings of kind = "{kind.value}"'
        raise DataError(msg)
    tree = {"components": {kind.value: {**settings, "kind": kind.value}}, "sandbox": sandbox}
    try:
        return VerifierConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems = [
            f"{path}: {_key(detail['loc'])}: {detail['msg']}"
            for detail in error.errors(include_url=False)
        ]
        raise DataError(*problems) from error


def _key(place: tuple[str | int, ...]) -> str:
    """Return the key of the task's file that stands at ``place`` of the config."""
    parts = ("verifier", *place[3:]) if place[0] == "components" else place
    return ".".join(map(str, parts))


def _check(
    config: VerifierConfig, kind: Kind, row: dict[str, Any], expected: str | None, path: Path
) -> None:
    """Raise DataError where the task could never be paid for."""
    from headrace.errors import DataError
    from headrace.verifiers import answer_checker, row_tasks

    tasks = row_tasks(config)
    problem = None if tasks is None else tasks.problem(row)
    if expected is not None:
        with answer_checker(config) as check:
            problem = check(expected, row)
    if problem is not None:
        what = "tests" if kind is Kind.CODE else "answer"
        msg = f"{path}: {what}: {problem.removeprefix(f'{kind.value}: ')}"
        raise DataError(msg)


def _read_row(path: Path) -> dict[str, Any]:
    from headrace.errors import DataError

    try:
        row = json.loads(_read(path))
    except json.JSONDecodeError as error:
        msg = f"{path}: line {error.lineno} is not JSON: {error.msg}"
        raise DataError(msg) from error
    if not isinstance(row, dict):
        msg = f"{path}: must be a JSON object"
        raise DataError(msg)
    return row


def _expected(row: dict[str, Any], path: Path) -> str:
    from headrace.errors import DataError

    if not isinstance(row.get("answer"), str | int | float):
        msg = f'{path}: must be a JSON object with "answer" as text or a number'
        raise DataError(msg)
    return str(row["answer"])


def _read(path: Path) -> str:
    from headrace.errors import DataError

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: {error}"
        raise DataError(msg) from error
