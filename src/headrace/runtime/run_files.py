"""The directory of a run: made once, refused when it belongs to another run, resumed when asked.

Owns the fingerprint: a hash of the model's files, of the training prompts, of the reward function's
source and of every setting that training depends on.
What may change between a run and its resumption (how long, what is shown, how often it is saved)
is listed here and nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config import (
    DeviceName,
    FunctionConfig,
    RewardModelConfig,
    RunConfig,
    dump_config,
)
from headrace.errors import RunDirectoryError
from headrace.monitors.run_directory import replace_file
from headrace.types import Prompt

CONFIG_FILE = "config.json"
LEDGER_FILE = "ledger.sqlite"
LOCK_FILE = "lock"
_OF_NOTHING = (LOCK_FILE, f".{CONFIG_FILE}.partial")
"""All that a process leaves which is killed before its run has begun."""
CHECKPOINT_DIRECTORY = "checkpoints"

_FREE_KEYS = (
    "name",
    "eval",
    "checkpoint",
    "faults",
    "monitors",
    "num_threads",
    "num_steps",
    "num_epochs",
    "alarms",
    "placement",
    "weight_sync",
)
"""A resumed run may change these; all others would make it another run."""
_FREE_COMPONENT_KEYS = ("url", "api_key_variable", "max_retries", "max_concurrent", "num_processes")
"""The same of a verifier's component: where it is and how much of it there is, not what it says."""


def fingerprint(config: RunConfig, model_directory: Path, prompts: Sequence[Prompt]) -> str:
    """Return 32 hex digits of model, starting adapter, prompts and settings that shape training."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        known = (prompt.prompt_id, prompt.token_ids, prompt.answer, prompt.metadata)
        digest.update(json.dumps(known, default=str, sort_keys=True).encode())
    for component in config.verifier.components.values():
        if isinstance(component, FunctionConfig) and (source := _source_of(component.path)):
            digest.update(source.read_bytes())
    digest.update(json.dumps(_binding(config), sort_keys=True).encode())
    for path in _starting_files(config, model_directory):
        if path.suffix in {".json", ".safetensors", ".jinja"}:
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            digest.update(_head(path))
    return digest.hexdigest()


def _starting_files(config: RunConfig, model_directory: Path) -> list[Path]:
    """Return the files in the directories of the model, its adapter and reward models."""
    lora, components = config.learner.lora, config.verifier.components.values()
    directories = [model_directory]
    if lora is not None and lora.start is not None:
        directories.append(lora.start)
    directories += [part.path for part in components if isinstance(part, RewardModelConfig)]
    return [path for directory in directories for path in sorted(directory.glob("*"))]


def make(directory: Path) -> None:
    """Make ``directory`` for a new run. Raises RunDirectoryError unless it is absent or empty."""
    if directory.exists() and not directory.is_dir():
        msg = f"output {directory} is a file; give a directory"
        raise RunDirectoryError(msg)
    try:
        _refuse_others(directory)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"output {directory} cannot be written: {error}"
        raise RunDirectoryError(msg) from error


def create(directory: Path, config: RunConfig) -> None:
    """Begin a new run in ``directory``, which was made and is locked.

    Looks once more: another run may have begun, and even ended, before the lock was had. Raises
    RunDirectoryError.
    """
    _refuse_others(directory)
    record(directory, config)


def _refuse_others(directory: Path) -> None:
    """Raise RunDirectoryError where something lies there. A lock that nobody holds is nothing."""
    found = directory.iterdir() if directory.is_dir() else ()
    if any(path.name not in _OF_NOTHING for path in found):
        raise RunDirectoryError(_taken(directory))


def resolved(
    directory: Path,
    config: RunConfig,
    *,
    device: DeviceName,
    num_threads: int,
    max_cache_gib: float,
) -> RunConfig:
    """Return ``config`` with what it leaves to the machine filled in.

    A run that is resumed goes on with the threads and the cache that it was begun with, also on
    another machine: both decide in which order numbers are added up, and so its last bits. Another
    ``device`` is another run.
    """
    before = _recorded(directory) or {}
    threads = before.get("num_threads") or num_threads
    cache = before.get("generator", {}).get("max_cache_gib") or max_cache_gib
    generator = config.generator
    if generator.max_cache_gib is None and generator.engine == "torch":
        generator = generator.model_copy(update={"max_cache_gib": cache})
    return config.model_copy(
        update={
            "device": device,
            "num_threads": config.num_threads or threads,
            "generator": generator,
        }
    )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep every other process out of the run in ``directory``.

    Raises RunDirectoryError when one is at work there. The lock ends with the process, however
    that ends.
    """
    try:
        file = (directory / LOCK_FILE).open("w", encoding="ascii")
    except OSError as error:
        msg = f"output {directory} cannot be written: {error}"
        raise RunDirectoryError(msg) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"output {directory}: another process is training there; end it, or wait for it"
            raise RunDirectoryError(msg) from error
        yield


def record(directory: Path, config: RunConfig) -> None:
    """Write the settings the run goes on with; a kill leaves the old file or the new one."""
    try:
        replace_file(directory / CONFIG_FILE, dump_config(config).encode())
    except OSError as error:
        msg = f"output {directory} cannot be written: {error}"
        raise RunDirectoryError(msg) from error


def check_same_run(directory: Path, config: RunConfig) -> None:
    """Check that ``directory`` is a run of the same recipe; changes nothing.

    Raises RunDirectoryError naming every setting that differs and may not.
    """
    before = _recorded(directory)
    if before is None:
        msg = (
            f"--resume: {directory} holds no run (no {CONFIG_FILE} of headrace in it); "
            "leave --resume out to start one, or give the --output of the run"
        )
        raise RunDirectoryError(msg)
    differences = list(_differences(_bound(before), _binding(config)))
    if differences:
        msg = (
            f"--resume: {directory} is a run with other settings: {'; '.join(differences)}. "
            "Give them as they were, or another --output"
        )
        raise RunDirectoryError(msg)


def _taken(directory: Path) -> str:
    if _recorded(directory) is not None:
        return (
            f"output {directory} already holds a run; continue it with --resume, "
            "or give another --output"
        )
    return f"output {directory} already holds other files; give an empty or a new --output"


def _recorded(directory: Path) -> dict[str, Any] | None:
    """Return the settings of the run in ``directory``; None if headrace wrote none there.

    A model's directory has a config.json too.
    """
    try:
        found = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    sections = ("model", "data", "generator", "learner") if isinstance(found, dict) else ()
    known = sections and all(isinstance(found.get(name), dict) for name in sections)
    return found if known else None


def _binding(config: RunConfig) -> dict[str, Any]:
    return _bound(json.loads(dump_config(config)))


def _bound(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must keep."""
    kept = {key: value for key, value in dumped.items() if key not in _FREE_KEYS}
    # How much memory there is, how much runs at once and where servers are is not what the run is.
    generator = dumped.get("generator", {})
    free = {"max_cache_gib", "sglang"}
    kept["generator"] = {key: generator[key] for key in generator if key not in free}
    verifier = dumped.get("verifier", {})
    parts = verifier.get("components", {})
    kept["verifier"] = verifier | {
        "components": {
            name: {key: part[key] for key in part if key not in _FREE_COMPONENT_KEYS}
            for name, part in parts.items()
        }
    }
    # Nor is on how many ranks the learner lies: any of them reads what others wrote.
    learner = dumped["learner"]
    kept["learner"] = {key: learner[key] for key in learner if key != "parallel"}
    optimizer = learner.get("optimizer", {})
    if optimizer.get("schedule") != "constant":
        # The schedule ends with the run: another length would be another learning rate.
        kept |= {key: dumped.get(key) for key in ("num_steps", "num_epochs")}
    return kept


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} was {json.dumps(old)} and is {json.dumps(new)}"


def _source_of(function_path: str) -> Path | None:
    """Return the file of the module that a reward function is in; None where it has none.

    What that module imports is not looked at.
    """
    module = function_path.rpartition(":")[0]
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    package = Path(*module.split("."))
    # As the verifier's processes look: where the command was given, before what is installed.
    for file in (package.with_suffix(".py"), package / "__init__.py"):
        if file.is_file():
            return file
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _head(path: Path) -> bytes:
    """The first megabyte: enough to tell two models apart without reading gigabytes."""
    with path.open("rb") as file:
        return file.read(1 << 20)
