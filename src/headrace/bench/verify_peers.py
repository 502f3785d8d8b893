"""How many programs that do not solve a task are paid for it: here, and by published graders.

Each program of `verify_forgeries` is graded once by each grader, with the same tests. A peer lives
in an environment of its own, which ``HEADRACE_GRADERS_PYTHON`` names; each of its verdicts is a
process of its own, because some of the programs end the grader. Measures no speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from headrace.bench import verify_peer_process
from headrace.bench.result import Figures, Peers, Progress
from headrace.bench.verify_forgeries import CASES, FORGERIES, HONEST, row
from headrace.config import CodeConfig, SandboxConfig
from headrace.errors import ConfigError, RunError
from headrace.types import Prompt
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.sandbox.execution import Executor
from headrace.verifiers.sandbox.tiers import build_executor

PEERS = tuple(verify_peer_process.GRADERS)
VARIABLE = "HEADRACE_GRADERS_PYTHON"

_LIMIT_SECONDS = 60.0
"""For one verdict of a peer; its own limits are shorter."""


def measure(peers: Peers, progress: Progress) -> Figures:
    """Return how many forgeries headrace pays for, and each of ``peers`` that is in `PEERS`.

    Raises ConfigError where nothing isolates code here or a peer's environment is not named,
    RunError where a grader does not pay for the honest program, which it must before its other
    verdicts mean anything.
    """
    progress(f"verify: {len(FORGERIES)} programs that want to be paid for nothing")
    paid = {"headrace": asyncio.run(_paid_here(build_executor(SandboxConfig())))}
    for peer in PEERS:
        if peer not in peers:
            continue
        python = _peer_python(peer)
        if not _paid_by(peer, python, HONEST):
            msg = f"{peer} in {python} does not pay for a right program; is it installed there?"
            raise RunError(msg)
        paid[peer] = [name for name, source in FORGERIES.items() if _paid_by(peer, python, source)]
    for grader, names in paid.items():
        progress(f"{grader} pays for {len(names)} of them")
        for name in names:
            progress(f"  {grader} pays: {name}")
    theirs = {f"forgeries_paid_{name.replace('-', '_')}": len(paid[name]) for name in paid}
    theirs["forgeries_paid"] = theirs.pop("forgeries_paid_headrace")
    figures = {"num_forgeries": len(FORGERIES), **theirs}
    return {name: float(number) for name, number in figures.items()}


async def _paid_here(executor: Executor) -> list[str]:
    """Return the forgeries that are paid here, and close ``executor``."""
    component = CodeComponent(CodeConfig(kind="code", wall_seconds=5.0), executor)
    prompt = Prompt(
        prompt_id="add", source="forgeries", text="Add.", token_ids=(0,), metadata=row()
    )

    async def reward(source: str) -> float | None:
        return (await component.score(prompt, f"```python\n{source}\n```")).reward

    if await reward(HONEST) != 1.0:
        msg = "headrace does not pay for a right program; `headrace doctor` tells of the sandbox"
        raise RunError(msg)
    rewards = {name: await reward(source) for name, source in FORGERIES.items()}
    await component.close()
    unscored = [name for name, value in rewards.items() if value is None]
    if unscored:
        msg = f"the sandbox failed, so these forgeries say nothing: {', '.join(unscored)}"
        raise RunError(msg)
    return [name for name, value in rewards.items() if value]


def _peer_python(peer: str) -> str:
    named = os.environ.get(VARIABLE)
    if named is None or not Path(named).is_file():
        msg = (
            f"{peer}: {VARIABLE} = {named!r}; must name the python of an environment that has "
            f"{', '.join(PEERS)}"
        )
        raise ConfigError(msg)
    return named


def _paid_by(peer: str, python: str, source: str) -> bool:
    """Whether ``peer`` pays for ``source``; a grader that was killed pays nothing."""
    task = json.dumps({"source": source, "cases": CASES})
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(  # noqa: S603 - the interpreter that the user named
            [python, verify_peer_process.__file__, peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(task, timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            _end(process)
    lines = output.strip().splitlines()
    try:
        return bool(lines) and json.loads(lines[-1]) == {"paid": True}
    except ValueError:
        return False


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the grader and what it started in its session, and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
