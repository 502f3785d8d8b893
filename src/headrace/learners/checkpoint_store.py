"""Checkpoints on disk: a checkpoint is there whole, or it is not there.

Written beside its final name, fsynced, renamed; older ones are deleted only after that. A kill or
a full disk at any point leaves every earlier checkpoint as it was. The state file comes last and
carries the fingerprint that ties a checkpoint to its model and recipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator
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


Write = Callable[[Path], Awaitable[Awaitable[None] | None]]
"""Fills a directory, or copies what is to be written and returns what ends when it is."""


class CheckpointStore:
    """The ``checkpoints`` directory of one run."""

    def __init__(self, directory: Path, *, keep: int, fingerprint: str) -> None:
        self._directory = directory
        self._keep = keep
        self._fingerprint = fingerprint
        self._under_way: asyncio.Task[StoredCheckpoint] | None = None

    async def save(self, step: int, policy_version: int, write: Write) -> StoredCheckpoint:
        """Begin a checkpoint and wait for it. Raises CheckpointError as `begin` and its task do."""
        return await (await self.begin(step, policy_version, write))

    async def begin(
        self, step: int, policy_version: int, write: Write
    ) -> asyncio.Task[StoredCheckpoint]:
        """Let ``write`` fill a fresh directory; return what makes it durable, then prunes.

        Returned as soon as ``write`` has copied what is to be kept. Only one may be under way.
        Both raise CheckpointError naming the directory; what was there before is untouched. So is
        a checkpoint of the same step: no renaming could replace it in one move.
        """
        final = self._directory / f"step-{step:06d}"
        if final.exists():
            msg = f"checkpoint {final} is there already and is never overwritten; move it away"
            raise CheckpointError(msg)
        # Of a name that nobody had before: a rank that outlives its learner, on a machine that was
        # cut off, may still write into the one that it knows.
        partial = self._directory / f"{_PARTIAL}{final.name}-{secrets.token_hex(4)}"
        stored = StoredCheckpoint(
            directory=final,
            step=step,
            policy_version=policy_version,
            fingerprint=self._fingerprint,
        )
        with self._undone(partial, final):
            self._begin(partial)
            writing = await write(partial)
        self._under_way = asyncio.create_task(
            self._finish(writing, partial, stored), name="checkpoint"
        )
        return self._under_way

    async def settle(self) -> None:
        """Wait for what is under way, whatever comes of it: somebody else waits for that, or did.

        Unblocked by the learner, which has a deadline or is closed, and by the disk.
        """
        if self._under_way is not None:
            await asyncio.gather(asyncio.shield(self._under_way), return_exceptions=True)

    async def _finish(
        self, writing: Awaitable[None] | None, partial: Path, stored: StoredCheckpoint
    ) -> StoredCheckpoint:
        """Waits for what is being written; unblocked by the learner, which has a deadline."""
        with self._undone(partial, stored.directory):
            if writing is not None:
                await writing
            # On a thread: waiting for the disk must not hold up the event loop.
            await asyncio.to_thread(_commit, partial, stored)
        await asyncio.to_thread(self._prune)
        return stored

    @contextlib.contextmanager
    def _undone(self, partial: Path, final: Path) -> Iterator[None]:
        """Leave nothing of a checkpoint that fails, and say so. Raises CheckpointError."""
        try:
            yield
        except (OSError, HeadraceError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = "Earlier checkpoints are intact" if self._all() else "There is no earlier one"
            msg = (
                f"checkpoint {final} could not be written: {error}. {kept}; free some space and "
                "run again with --resume"
            )
            raise CheckpointError(msg) from error

    def latest(self, up_to: int | None = None) -> StoredCheckpoint | None:
        """Return the newest checkpoint, at most of step ``up_to``, or None.

        Raises CheckpointError if it is damaged. No kill leaves a damaged one, so going back to an
        earlier one is for a person to decide.
        """
        found = [path for path in self._all() if up_to is None or _step_of(path) <= up_to]
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
        return sorted(found, key=_step_of)

    def _prune(self) -> None:
        for old in self._all()[: -self._keep]:
            # Renamed first, so that a kill in the middle leaves no half checkpoint with its name.
            doomed = self._directory / f"{_PARTIAL}{old.name}"
            # The new checkpoint is safe: what cannot be deleted now is tried again next time.
            with contextlib.suppress(OSError):
                old.rename(doomed)
                shutil.rmtree(doomed)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _commit(partial: Path, stored: StoredCheckpoint) -> None:
    """Turn a written ``partial`` into the checkpoint it is to be; durable once this returns."""
    _write_state(partial, stored)
    _sync_tree(partial)
    partial.rename(stored.directory)
    _sync(stored.directory.parent)


def _write_state(directory: Path, stored: StoredCheckpoint) -> None:
    fields: dict[str, object] = asdict(stored)
    del fields["directory"]
    text = json.dumps(fields | {"files": _sizes(directory)}, indent=2)
    (directory / _STATE).write_text(text + "\n", encoding="utf-8")


def _read_state(directory: Path) -> StoredCheckpoint:
    try:
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        files = dict(state.pop("files"))
        damaged = sorted(name for name, size in files.items() if _size(directory / name) != size)
        stored = StoredCheckpoint(directory=directory, **state)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(_damage(directory, f"{_STATE}: {error!r}")) from error
    if damaged:
        raise CheckpointError(_damage(directory, f"{', '.join(damaged)} missing or cut short"))
    if stored.step != _step_of(directory):
        raise CheckpointError(_damage(directory, f"it says that it is of step {stored.step}"))
    return stored


def _damage(directory: Path, what: str) -> str:
    return (
        f"checkpoint {directory} is damaged: {what}. Restore it, or move it away to go on from "
        "the one before it"
    )


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
