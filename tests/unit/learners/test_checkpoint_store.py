"""A checkpoint is there whole, or it is not there."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.errors import CheckpointError
from headrace.learners import CheckpointStore, StoredCheckpoint, checkpoint_store


def store_in(directory: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(directory, keep=keep, fingerprint="f" * 32)


def writer(text: str) -> Callable[[Path], Awaitable[None]]:
    async def write(directory: Path) -> None:
        (directory / "hf").mkdir()
        (directory / "hf" / "model").write_text(text, encoding="utf-8")

    return write


def save(store: CheckpointStore, step: int, text: str = "weights") -> StoredCheckpoint:
    return asyncio.run(store.save(step, 10 * step, writer(text)))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_last_is_found_with_its_version_and_fingerprint(tmp_path: Path) -> None:
    store = store_in(tmp_path / "checkpoints")
    assert store.latest() is None
    save(store, 5)
    saved = save(store, 12)
    found = store_in(tmp_path / "checkpoints").latest()
    assert found == saved
    assert (found.step, found.policy_version, found.fingerprint) == (12, 120, "f" * 32)
    assert (found.directory / "hf" / "model").read_text() == "weights"


def test_only_so_many_are_kept_and_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = store_in(tmp_path, keep=2)
    for step in (999_999, 1_000_000, 1_000_001):
        save(store, step)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_write_that_fails_leaves_the_earlier_checkpoint_and_nothing_else(
    keep: int, tmp_path: Path
) -> None:
    store = store_in(tmp_path, keep=keep)
    before = save(store, 1)

    async def fail(directory: Path) -> None:
        (directory / "half").write_bytes(b"x" * 100)
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000002 could not be written.*No space left"):
        asyncio.run(store.save(2, 2, fail))
    assert store.latest() == before
    assert names(tmp_path) == ["step-000001"]


def test_earlier_ones_are_deleted_only_after_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path, keep=1)
    save(store, 1)
    real, seen = os.fsync, []

    def watch(descriptor: int) -> None:
        seen.append(names(tmp_path))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    save(store, 2)
    assert all("step-000001" in found for found in seen)
    # The last one is that of the directory, after the renaming.
    assert seen[-1] == ["step-000001", "step-000002"]
    assert "step-000002" not in seen[-2]
    assert len(seen) == 5  # the model, its folder, the state, the checkpoint, the directory
    assert names(tmp_path) == ["step-000002"]


def test_a_full_disk_is_an_error_and_the_earlier_checkpoint_still_loads(
    small_disk: Path,
) -> None:
    store = store_in(small_disk / "checkpoints", keep=1)
    before = save(store, 1, "x" * 500_000)
    with pytest.raises(CheckpointError, match=r"checkpoints/step-000002 could not be written"):
        save(store, 2, "y" * 3_000_000)
    assert store.latest() == before
    assert (before.directory / "hf" / "model").read_text() == "x" * 500_000
    assert names(small_disk / "checkpoints") == ["step-000001"]
    save(store, 3, "z" * 500_000)


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, 1, "first")
    with pytest.raises(CheckpointError, match="step-000001 is there already"):
        save(store, 1, "second")
    assert (tmp_path / "step-000001" / "hf" / "model").read_text() == "first"


def test_leftovers_of_a_kill_are_no_checkpoints_and_go_with_the_next_save(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    (tmp_path / ".partial-step-000007").mkdir()
    (tmp_path / ".partial-step-000007" / "half").write_text("x")
    found = store.latest()
    assert found is not None
    assert found.step == 1
    save(store, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("hf/model", None),
        ("hf/model", "cut"),
        ("state.json", None),
        ("state.json", "{"),
        ("state.json", "[]"),
        ("state.json", '{"files": {}, "step": 1}'),
        ("state.json", '{"files": 3}'),
    ],
)
def test_a_damaged_checkpoint_is_named_and_not_passed_over(
    file: str, content: str | None, tmp_path: Path
) -> None:
    store = store_in(tmp_path)
    save(store, 1)
    damaged = save(store, 2).directory
    (damaged / file).unlink()
    if content is not None:
        (damaged / file).write_text(content)
    with pytest.raises(CheckpointError, match=rf"step-000002 is damaged: .*{file}.*move it away"):
        store.latest()
    shutil.rmtree(damaged)
    found = store.latest()
    assert found is not None
    assert found.step == 1


def test_the_state_file_lists_every_file_with_its_size(tmp_path: Path) -> None:
    directory = save(store_in(tmp_path), 3).directory
    state = json.loads((directory / "state.json").read_text())
    assert state == {
        "step": 3,
        "policy_version": 30,
        "fingerprint": "f" * 32,
        "files": {"hf/model": 7},
    }


_SAVES_FOR_EVER = """
import asyncio, importlib.util, itertools, sys
from pathlib import Path
# The module by its path: its package imports torch, which takes seconds.
spec = importlib.util.spec_from_file_location("checkpoint_store", sys.argv[2])
sys.modules["checkpoint_store"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
CheckpointStore = module.CheckpointStore
directory = Path(sys.argv[1])
store = CheckpointStore(directory, keep=1, fingerprint="f")
async def main():
    last = store.latest()
    for step in itertools.count(last.step + 1 if last else 1):
        async def write(folder):
            for part in range(4):
                (folder / f"part-{part}").write_text(f"{step}\\n" * 2000)
        await store.save(step, step, write)
        print(step, flush=True)
asyncio.run(main())
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_at_least_as_new_as_the_last_one_told(
    saves_directory: Path,
) -> None:
    draw = random.Random(0)  # noqa: S311 - moments, not secrets
    told = 0
    for _ in range(6):
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _SAVES_FOR_EVER,
                str(saves_directory),
                checkpoint_store.__file__,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        told = int(process.stdout.readline())
        # Anywhere within a save or two of the next ones.
        time.sleep(draw.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split("\n")[:-1]
        told = int(lines[-1]) if lines else told
        process.wait()
        process.stdout.close()
        found = store_in(saves_directory).latest()
        assert found is not None
        assert found.step >= told
        for part in range(4):
            text = (found.directory / f"part-{part}").read_text()
            assert text == f"{found.step}\n" * 2000


@pytest.fixture
def saves_directory() -> Iterator[Path]:
    """In memory where there is such a place: the moments of a kill matter here, not the disk."""
    memory = Path("/dev/shm")  # noqa: S108 - only a place, never a fixed name
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        yield Path(directory)


def test_what_is_under_way_is_waited_for_whatever_comes_of_it_and_whoever_gives_up(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store, release = store_in(tmp_path), asyncio.Event()
        await store.settle()

        async def slow(directory: Path) -> Awaitable[None]:
            async def written() -> None:
                await release.wait()
                if "000002" in directory.name:
                    msg = "the learner died"
                    raise CheckpointError(msg)

            return written()

        writing = await store.begin(1, 1, slow)
        impatient = asyncio.create_task(store.settle())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        assert not writing.done(), "whoever waits for it does not end it"
        release.set()
        await store.settle()
        assert store.latest() == writing.result()

        failing = await store.begin(2, 2, slow)
        await store.settle()
        assert isinstance(failing.exception(), CheckpointError)
        assert names(tmp_path) == ["step-000001"]

    asyncio.run(scenario())
