"""The program that makes the rows of a reasoning-gym task, in a process of its own.

Owns the rule that rows depend on the request alone: the parent fixes the order of sets by
PYTHONHASHSEED, and every source of chance that a task may use without being asked is seeded here,
row by row. Reads one request from standard input, as JSON, and answers in JSON lines:
``{"row": ...}``, and at most one ``{"problems": [...]}`` or ``{"failed": text}`` at the end. What
the package prints goes to standard error.

Started by path and not as a module, so that nothing of headrace has to be imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

Line = dict[str, Any]


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    sys.set_int_max_str_digits(0)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in _answers(request):
            # One by one: when a row ends the process, those before it have arrived.
            print(json.dumps(line), file=answers, flush=True)


def _answers(request: Line) -> Iterator[Line]:
    """Yield the rows, or what is wrong; each has ``row_seconds``, after which SIGALRM kills."""
    task, seed, options = request["task"], request["seed"], request["options"]
    signal.alarm(request["row_seconds"])
    try:
        with warnings.catch_warnings():
            # One of its dependencies leaves a file open while it is imported.
            warnings.simplefilter("ignore")
            import reasoning_gym  # noqa: PLC0415 - an extra; its absence is an answer too
    except ImportError as error:
        yield {"not_imported": str(error)}
        return
    problems = list(_option_problems(task, options, reasoning_gym.factory.DATASETS))
    if problems:
        yield {"problems": problems}
        return
    try:
        _seed_all(seed)
        rows = reasoning_gym.create_dataset(task, size=request["size"], seed=seed, **options)
    except Exception as error:  # noqa: BLE001 - a package's own code, and any of its errors an answer
        said = str(error) or type(error).__name__
        yield {"problems": [f"options of reasoning_gym task {task} = {options}: {said}"]}
        return
    for index in range(request["size"]):
        signal.alarm(request["row_seconds"])
        try:
            _seed_all(seed + index)
            row = {str(key): _plain(value) for key, value in rows[index].items()}
        except Exception as error:  # noqa: BLE001 - as above
            yield {"failed": f"{type(error).__name__}: {error}"}
            return
        yield {"row": row}


def _seed_all(seed: int) -> None:
    """Seed the generators that a task may use beside its own, as the package seeds its own."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _option_problems(task: str, options: Line, tasks: dict[str, Any]) -> Iterator[str]:
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, n=3)
        allowed = f"did you mean {' or '.join(close)}?" if close else ", ".join(sorted(tasks))
        yield f'task = "{task}": not a task of reasoning-gym; {allowed}'
        return
    fields = {field.name for field in dataclasses.fields(tasks[task][1])} - {"seed", "size"}
    for name in options:
        if name not in fields:
            yield f"options.{name}: not an option of {task}; {_instead(name, fields)}"


def _instead(name: str, fields: set[str]) -> str:
    if name in {"seed", "size"}:
        return f"{name} is a key of the source itself"
    close = difflib.get_close_matches(name, fields, n=1)
    return f"did you mean {close[0]}?" if close else f"allowed: {', '.join(sorted(fields))}"


def _plain(value: object) -> object:
    """Return ``value`` as JSON can hold it: sets and tuples as lists, anything unknown as text."""
    match value:
        case None | bool() | float() | str():
            return value
        case int():
            # Python reads back no number of more than 4300 digits.
            return value if value.bit_length() < 2**12 else str(value)
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
        case _ if hasattr(value, "tolist"):  # of numpy
            return _plain(value.tolist())
        case _:
            return str(value)


if __name__ == "__main__":
    main()
