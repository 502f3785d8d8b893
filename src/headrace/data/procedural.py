"""Rows made by a task of the reasoning-gym package (extra ``envs``).

Every row has the columns ``question``, ``answer`` and ``metadata``, as the package makes them.
The package makes row i from ``seed + i``, so two seeds closer than ``size`` share most of their
rows; `headrace.data.prompts` takes shared ones out. The package's scorers are not used here.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from headrace.config import ReasoningGymSource
from headrace.data.rows import Row
from headrace.errors import ConfigError


def read_task(source: ReasoningGymSource) -> Iterator[Row]:
    """Yield ``source.size`` rows. Raises ConfigError naming the key that is wrong."""
    package = _import_package()
    _check_options(source, package.factory.DATASETS)
    try:
        task = package.create_dataset(
            source.task, size=source.size, seed=source.seed, **source.options
        )
    except (AssertionError, TypeError, ValueError) as error:
        msg = f"options of reasoning_gym task {source.task} = {source.options}: {error}"
        raise ConfigError(msg) from error
    for index in range(source.size):
        yield Row(number=index + 1, values=task[index])


def _import_package() -> Any:  # noqa: ANN401 - the package ships no types
    try:
        with warnings.catch_warnings():
            # One of its dependencies leaves a file open while it is imported.
            warnings.simplefilter("ignore", ResourceWarning)
            return importlib.import_module("reasoning_gym")
    except ImportError as error:
        msg = (
            f'type = "reasoning_gym": the package cannot be imported ({error}); '
            'run pip install "headrace[envs]"'
        )
        raise ConfigError(msg) from error


def _check_options(source: ReasoningGymSource, tasks: dict[str, tuple[type, type]]) -> None:
    if source.task not in tasks:
        close = difflib.get_close_matches(source.task, tasks, n=3)
        allowed = f"did you mean {' or '.join(close)}?" if close else ", ".join(sorted(tasks))
        msg = f'task = "{source.task}": not a task of reasoning-gym; {allowed}'
        raise ConfigError(msg)
    fields = {field.name for field in dataclasses.fields(tasks[source.task][1])}
    fields -= {"seed", "size"}
    problems = [
        f"options.{name}: not an option of {source.task}; {_instead(name, fields)}"
        for name in source.options
        if name not in fields
    ]
    if problems:
        raise ConfigError(*problems)


def _instead(name: str, fields: set[str]) -> str:
    if name in {"seed", "size"}:
        return f"{name} is a key of the source itself"
    close = difflib.get_close_matches(name, fields, n=1)
    return f"did you mean {close[0]}?" if close else f"allowed: {', '.join(sorted(fields))}"
