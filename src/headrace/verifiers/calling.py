"""The worker's side of a reward function: finds it, calls it, and says what it returned.

Runs the user's own code, which is trusted and knows the expected answer. What it returns is not
trusted: anything but a finite number or None is reported and never coerced.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError
from headrace.verifiers import frames

MAX_REWARD = 1e6
"""Of either sign."""
_MAX_TRACEBACK_CHARS = 20_000
"""The end of it, where it was raised."""

RewardFunction = Callable[..., Any]


def load(path: str) -> Callable[[frames.Message], frames.Message]:
    """Return the handler of the function at ``path``. Raises ConfigError saying what is wrong."""
    function = _find(path)

    def handle(job: frames.Message) -> frames.Message:
        try:
            value = function(job["prompt"], job["completion"], job["answer"], job["metadata"])
            return _returned(path, value)
        except MemoryError:
            raise
        # The one boundary to code that is not ours: SystemExit is an error of one rollout, too.
        except BaseException as error:  # noqa: BLE001 - see the line above
            return _raised(path, error)

    return handle


def _find(path: str) -> RewardFunction:
    module_name, _, name = path.rpartition(":")
    module = _import(path, module_name)
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        msg = f"path = {path!r}: {module_name} has no {name!r}; its functions: {names or 'none'}"
        raise ConfigError(msg)
    if not callable(function):
        msg = f"path = {path!r}: {name} is a {type(function).__name__}, not a function"
        raise ConfigError(msg)
    _check_signature(path, function)
    return function  # type: ignore[no-any-return]  # getattr on a module is Any


def _import(path: str, module_name: str) -> ModuleType:
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).is_file():
        msg = f"path = {path!r}: no file {Path(module_name).absolute()}"
        raise ConfigError(msg)
    sys.path.insert(0, str(Path(module_name).absolute().parent) if is_file else os.getcwd())  # noqa: PTH109 - sys.path holds text
    try:
        return _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    # The same boundary: a module may raise anything at all while it is imported.
    except BaseException as error:
        what = f"{type(error).__name__}: {_text(error)}{_where(error)}"
        msg = f"path = {path!r}: importing {module_name} raised {what}"
        raise ConfigError(msg) from error


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _check_signature(path: str, function: RewardFunction) -> None:
    if inspect.iscoroutinefunction(function):
        msg = f"path = {path!r}: is an async function; write a plain one, it has its own process"
        raise ConfigError(msg)
    try:
        inspect.signature(function).bind("prompt", "completion", "answer", {})
    except TypeError as error:
        msg = (
            f"path = {path!r}: cannot be called as (prompt, completion, answer, metadata): {error}"
        )
        raise ConfigError(msg) from error
    except ValueError:
        # A built-in without a signature; the first call will tell.
        return


def _returned(path: str, value: object) -> frames.Message:
    if value is None:
        return {"status": "ok", "value": None, "detail": f"{path} returned None: it abstains"}
    number = _finite(value)
    if number is None:
        what = _text(value, 80)
        what = what if isinstance(value, Real) else f"{type(value).__name__} {what!r}"
        return {
            "status": "error",
            "detail": f"{path} returned {what} for one completion; allowed: one finite number "
            f"between -{MAX_REWARD:g} and {MAX_REWARD:g}, or None to abstain",
        }
    return {"status": "ok", "value": number}


def _finite(value: object) -> float | None:
    """Return ``value`` where it is a number that may be paid."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        # An integer beyond the floats, such as 10**400.
        return None
    return number if math.isfinite(number) and abs(number) <= MAX_REWARD else None


def _raised(path: str, error: BaseException) -> frames.Message:
    trace = "".join(traceback.format_exception(error))
    return {
        "status": "error",
        "detail": f"{path} raised {type(error).__name__}: {_text(error, 200)}{_where(error)}",
        "traceback": trace[-_MAX_TRACEBACK_CHARS:],
    }


def _text(value: object, limit: int = 1000) -> str:
    """Return the start of the text of what is not ours: making it may raise anything."""
    try:
        text = str(value)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - see above; its text is not asked for
        return f"(its text cannot be made: {type(error).__name__})"
    return text[:limit] + "..." * (len(text) > limit)


def _where(error: BaseException) -> str:
    """Return where in the user's code it was raised: the last frame."""
    frames_ = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames_[-1].filename).name} line {frames_[-1].lineno})" if frames_ else ""
