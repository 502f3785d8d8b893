"""Checkpoints on disk: a checkpoint is there whole, or it is not there.

Written beside its final name, fsynced, renamed; older ones are deleted only after that. A kill or
a full disk at any point leaves every earlier checkpoint as it was. The state file comes last and
carries the fingerprint that ties a checkpoint to its model and recipe.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import CheckpointError, HeadraceError

_NAME = re.compile(r"^step-(\d{6,})$")
_PARTIAL = ".partial-"
_STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One whole checkpoint."""

    directory: Path
    step: int
    """Training steps done."""
    policy_version: int
    fingerprint: str
    """Of the model and every setting that training depends on."""


class CheckpointStore:
    """The ``checkpoints`` directory of one run."""

    def __init__(self, directory: Path, *, keep: int, fingerprint: str) -> None:
        self._directory = directory
        self._keep = keep
        self._fingerprint = fingerprint

    async def save(
        self, step: int, policy_version: int, write: Callable[[Path], Awaitable[None]]
    ) -> StoredCheckpoint:
        """Let ``write`` fill a fresh directory, make it durable, then prune.

        Raises CheckpointError naming the directory; what was there before is untouched.
        """
        final = self._directory / f"step-{step:06d}"
        partial = self._directory / f"{_PARTIAL}{final.name}"
        stored = StoredCheckpoint(
            directory=final,
            step=step,
            policy_version=policy_version,
            fingerprint=self._fingerprint,
        )
        try:
            self._begin(partial)
            await write(partial)
            _write_state(partial, stored)
            _sync_tree(partial)
            _replace(partial, final)
        except (OSError, HeadraceError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            msg = (
                f"checkpoint {final} could not be written: {error}. Earlier checkpoints are "
                "intact; free some space and run again with --resume"
            )
            raise CheckpointError(msg) from error
        self._prune()
        return stored

    def latest(self) -> StoredCheckpoint | None:
        """Return the newest whole checkpoint, or None. Raises CheckpointError if it is damaged."""
        found = self._all()
        return _read_state(found[-1]) if found else None

    def _begin(self, partial: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for leftover in self._directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def _all(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        found = [path for path in self._directory.iterdir() if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _prune(self) -> None:
        for old in self._all()[: -self._keep]:
            # Renamed first, so that a kill in the middle leaves no half checkpoint with its name.
            doomed = self._directory / f"{_PARTIAL}{old.name}"
            old.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _write_state(directory: Path, stored: StoredCheckpoint) -> None:
    fields: dict[str, object] = asdict(stored)
    del fields["directory"]
    text = json.dumps(fields | {"files": _sizes(directory)}, indent=2)
    (directory / _STATE).write_text(text + "\n", encoding="utf-8")


def _read_state(directory: Path) -> StoredCheckpoint:
    try:
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        files: Mapping[str, int] = state.pop("files")
        damaged = sorted(name for name, size in files.items() if _size(directory / name) != size)
        stored = StoredCheckpoint(directory=directory, **state)
    except (OSError, ValueError, TypeError, KeyError) as error:
        msg = f"checkpoint {directory} is damaged: {_STATE}: {error}"
        raise CheckpointError(msg) from error
    if damaged:
        msg = f"checkpoint {directory} is damaged: {', '.join(damaged)} missing or of another size"
        raise CheckpointError(msg)
    return stored


def _sizes(directory: Path) -> dict[str, int]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _sync_tree(directory: Path) -> None:
    """Make every file and directory below ``directory`` durable, itself included."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(partial: Path, final: Path) -> None:
    """Put ``partial`` in the place of ``final``, which a later kill may have left behind."""
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)
