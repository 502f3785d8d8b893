"""The part of `bench verify` about math: verdicts a second, and how many of them are wrong.

Measured through the verifier's own component, a group of eight rollouts at a time, many groups
side by side: numbers and fractions, which this process decides, and expressions, for which there
are two grading processes. The peer is math-verify on the same answers: two processes that call
``parse`` and ``verify`` in a loop and nothing else. Starting processes is not measured, on either
side.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from headrace.bench.result import Figures, Peers, Progress
from headrace.bench.verify_math_tasks import MathTask, number_tasks, symbolic_tasks
from headrace.config import MathConfig
from headrace.errors import ConfigError, RunError
from headrace.types import Prompt
from headrace.verifiers.math.component import MathComponent

PEER = "math-verify"
NUM_PROCESSES = 2
NUM_NUMBER_GROUPS = 1000
NUM_SYMBOLIC_GROUPS = 250
_PEER_SHARE = 5
"""The peer grades one group in so many: it takes tens of milliseconds for an answer."""
_GROUPS_AT_ONCE = 32
_LIMIT_SECONDS = 1800.0


def measure(peers: Peers, progress: Progress) -> Figures:
    """Return the figures of both sorts of answers. Raises ConfigError where the peer is missing."""
    if PEER in peers and importlib.util.find_spec("math_verify") is None:
        msg = (
            "bench verify --against math-verify: math-verify is not installed; run `pip install "
            "-c constraints.txt -e '.[math-verify]'` in the source folder"
        )
        raise ConfigError(msg)
    figures: dict[str, float] = {}
    numbers, symbolic = number_tasks(NUM_NUMBER_GROUPS), symbolic_tasks(NUM_SYMBOLIC_GROUPS)
    for name, tasks in (("math", numbers), ("symbolic", symbolic)):
        rate, num_wrong = asyncio.run(_graded(tasks))
        progress(f"{name}: {rate:.0f} verdicts a second, {num_wrong} of them wrong")
        figures |= {f"{name}_verdicts_per_second": rate, f"{name}_wrong_verdicts": num_wrong}
        if PEER in peers:
            rate, share = graded_by_peer(tasks[::_PEER_SHARE])
            progress(f"{name}: math-verify {rate:.0f} a second, {share:.1%} of them wrong")
            figures[f"math_verify_{name}_verdicts_per_second"] = rate
            figures[f"math_verify_{name}_wrong_share"] = share
    return figures


async def _graded(tasks: Sequence[MathTask]) -> tuple[float, int]:
    """Return verdicts a second, and how many differ from what is known."""
    component = MathComponent(MathConfig(kind="math", num_processes=NUM_PROCESSES))
    try:
        # Both processes are up, and have imported what they need, before the clock starts.
        await asyncio.gather(*(_group(component, task) for task in tasks[:NUM_PROCESSES]))
        began = time.perf_counter()
        num_wrong = 0
        for start in range(0, len(tasks), _GROUPS_AT_ONCE):
            groups = tasks[start : start + _GROUPS_AT_ONCE]
            num_wrong += sum(await asyncio.gather(*(_group(component, task) for task in groups)))
        seconds = time.perf_counter() - began
    finally:
        await component.close()
    return sum(len(task.answers) for task in tasks) / seconds, num_wrong


async def _group(component: MathComponent, task: MathTask) -> int:
    """Return how many verdicts on a group are not what is known."""
    prompt = Prompt(prompt_id="p", source="bench", text="", token_ids=(0,), answer=task.gold)
    scores = await asyncio.gather(
        *(component.score(prompt, rf"So \boxed{{{text}}}") for text, _ in task.answers)
    )
    return sum(
        score.reward != float(is_right)
        for score, (_, is_right) in zip(scores, task.answers, strict=True)
    )


def graded_by_peer(tasks: Sequence[MathTask]) -> tuple[float, float]:
    """Return math-verify's verdicts a second in two processes, and the share that is wrong.

    Raises RunError where one of them fails.
    """
    parts = [tasks[part::NUM_PROCESSES] for part in range(NUM_PROCESSES)]
    with ThreadPoolExecutor(NUM_PROCESSES) as threads:
        found = list(threads.map(_peer_process, parts))
    rate = sum(part["num_verdicts"] / part["seconds"] for part in found)
    num_verdicts = sum(part["num_verdicts"] for part in found)
    return rate, sum(part["num_wrong"] for part in found) / num_verdicts


def _peer_process(tasks: Sequence[MathTask]) -> Mapping[str, float]:
    """Grade tasks in a process of math-verify's own.

    Waits for its end; unblocked by that, or by killing it after `_LIMIT_SECONDS`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "headrace.bench.verify_math_peer"],
        input="".join(json.dumps(asdict(task)) + "\n" for task in tasks),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=_LIMIT_SECONDS,
    )
    if done.returncode != 0:
        msg = f"math-verify's process ended with status {done.returncode}"
        raise RunError(msg)
    found: Mapping[str, float] = json.loads(done.stdout)
    return found
