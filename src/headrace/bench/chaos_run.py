"""One run under chaos: what is killed when, and whether everything came out as promised.

A run is a command as a user gives it, `headrace train RECIPE --restarts N`, and nobody helps it.
Three times a process is killed, of a random role, at a random step and moment. Looked for: that
the run ends by itself; every prompt of every epoch settled once; every step recorded once, none
beyond its staleness; and no process, segment of shared memory or temporary file left.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.chaos_processes import Processes
from headrace.bench.chaos_task import Task

ACCURACY = "eval/greedy/pass_at_1"
RESTARTS = 5
_TICK_SECONDS = 0.03
_MAX_DELAY_SECONDS = 1.0
"""After the step before which something is killed; at the start three times as long."""
_GONE_SECONDS = 20.0
"""For what a run leaves behind to go, once it has ended."""
_MEMORY = Path("/dev/shm")  # noqa: S108 - it is looked at, and nothing is written there
_LAST_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One that was killed."""

    role: str
    step: int
    """Steps on record by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """What became of one run."""

    seed: int | None
    """None: undisturbed."""
    kills: tuple[Kill, ...]
    problems: tuple[str, ...]
    """One line for each promise that was broken."""
    accuracy: float | None
    """Held out, after the last step."""
    seconds: float


@dataclass(slots=True)
class _Plan:
    """Moments at which something is killed, soonest first."""

    random: random.Random
    moments: list[tuple[int, float]]
    """Steps on record, and seconds after that."""
    kills: list[Kill] = field(default_factory=list)
    _reached_at: float | None = None

    @classmethod
    def drawn(cls, seed: int | None, num_kills: int, num_steps: int) -> _Plan:
        chance = random.Random(seed)  # noqa: S311 - chaos, and no secret
        count = 0 if seed is None else num_kills
        steps = sorted(chance.randrange(num_steps) for _ in range(count))
        return cls(chance, [(step, chance.random()) for step in steps])

    def act(self, num_steps: int, processes: Processes) -> None:
        """Kill what is due, if anything is."""
        alive = processes.look()
        if not self.moments or num_steps < self.moments[0][0] or not alive:
            return
        step, share = self.moments[0]
        self._reached_at = self._reached_at or time.monotonic()
        delay = share * _MAX_DELAY_SECONDS * (1.0 if step else 3.0)
        if time.monotonic() - self._reached_at < delay:
            return
        role = self.random.choice(sorted(alive))
        if processes.kill(self.random.choice(sorted(alive[role]))):
            self.kills.append(Kill(role=role, step=num_steps))
            self.moments.pop(0)
            self._reached_at = None


def run_under_chaos(
    task: Task,
    folder: Path,
    *,
    seed: int | None,
    num_kills: int = 3,
    settings: Sequence[str] = (),
    limit_seconds: float,
) -> ChaosReport:
    """Train in ``folder``, which is made, and look at what came of it.

    ``seed``: of what is killed when; None kills nothing. ``settings``: more of ``a.b=c``. Waits for
    the run's end; unblocked by that, or by killing all of it after ``limit_seconds``.
    """
    recipe, run, temporary = task.write(folder), folder / "run", folder / "tmp"
    temporary.mkdir()
    plan, memory = _Plan.drawn(seed, num_kills, task.num_steps), _names(_MEMORY)
    began = time.monotonic()
    problems: list[str] = []
    with _started(recipe, folder, settings) as process:
        processes = Processes(process.pid)
        while process.poll() is None:
            plan.act(_num_steps(run), processes)
            if time.monotonic() - began > limit_seconds:
                problems.append(f"it did not end within {limit_seconds:.0f} s")
                process.kill()
            time.sleep(_TICK_SECONDS)
    seconds = time.monotonic() - began
    if process.returncode != 0:
        problems.append(f"it ended with status {process.returncode}: {_last_lines(folder / 'log')}")
    else:
        problems += _broken_promises(task, run)
    problems += _left_behind(processes, temporary, memory)
    return ChaosReport(
        seed=seed,
        kills=tuple(plan.kills),
        problems=tuple(problems),
        accuracy=_accuracy(run),
        seconds=seconds,
    )


@contextmanager
def _started(
    recipe: Path, folder: Path, settings: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "headrace", "train", str(recipe)]
    command += ["--output", str(folder / "run"), "--restarts", str(RESTARTS)]
    command += [word for setting in settings for word in ("--set", setting)]
    # torch keeps what it has compiled for the next process, which is no litter.
    places = {"TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(  # noqa: S603 - our own command
            command, env=os.environ | places, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()  # it takes the run with it


def _broken_promises(task: Task, run: Path) -> Iterator[str]:
    """Yield what is wrong in the records of a run that ended well."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT epoch, prompt_id, step, reason FROM settled").fetchall()
    expected = task.num_epochs * task.num_prompts
    if len({(epoch, prompt) for epoch, prompt, _, _ in rows}) != expected:
        yield f"{len(rows)} prompts are settled, {expected} were drawn"
    trained = Counter(step for _, _, step, reason in rows if reason is None)
    steps = [line for line in _records(run) if line["kind"] == "step"]
    if [line["step"] for line in steps] != list(range(1, len(steps) + 1)):
        yield f"steps on record: {[line['step'] for line in steps]}"
    if sorted(trained) != [line["step"] for line in steps]:
        yield f"steps in the ledger: {sorted(trained)}, on record: {len(steps)}"
    if any(count > task.groups_per_step for count in trained.values()):
        yield f"groups by step: {dict(trained)}"
    stalest = max((line["metrics"]["learner/staleness/max"] for line in steps), default=0.0)
    if stalest > task.max_staleness:
        yield f"staleness {stalest:g} above {task.max_staleness}"


def _left_behind(processes: Processes, temporary: Path, memory: set[str]) -> list[str]:
    """Return what is still there some time after the end."""
    deadline = time.monotonic() + _GONE_SECONDS
    while True:
        alive, files = processes.alive(), _names(temporary)
        segments = _names(_MEMORY) - memory
        if not (alive or files or segments):
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(_TICK_SECONDS)
    found = {
        "processes": sorted(map(str, alive)),
        "temporary files": sorted(files),
        f"files in {_MEMORY}": sorted(segments),
    }
    return [f"left behind: {what} {', '.join(names)}" for what, names in found.items() if names]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _num_steps(run: Path) -> int:
    """Return how many steps are on record; -1 before the run has written its settings."""
    if not (run / "config.json").is_file():
        return -1
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"kind": "step"') if path.is_file() else 0


def _records(run: Path) -> list[Mapping[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _accuracy(run: Path) -> float | None:
    found = [line["metrics"].get(ACCURACY) for line in _records(run) if line["kind"] != "step"]
    return found[-1] if len(found) > 1 else None


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join(lines[-_LAST_LINES:])
