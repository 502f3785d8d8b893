"""Math answers: numbers are compared here, everything else in killable, memory-capped processes.

The processes run no model code, so the expected answer may go there. A completion that is over a
cap, unreadable or empty is wrong, and so is one that a process computes on for too long or falls
over; one that waited for a busy machine, or was killed, leaves the rollout unscored, because a
failure of our own is not a wrong answer.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from fractions import Fraction
from typing import get_args

from headrace.config import AnswerType, MathConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.component import (
    Score,
    failed_score,
    no_answer_to_compare,
    right_or_wrong,
    shown,
    unscored,
)
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.deciding import ExactDecider, NeedsAlgebra, Tolerance
from headrace.verifiers.math.exact import value_of
from headrace.verifiers.math.finding import find_answer
from headrace.verifiers.math.judging import (
    UnreadableGold,
    explain,
    judge,
    read_gold,
    repeats_task,
)
from headrace.verifiers.math.reading import trees
from headrace.verifiers.math.work import MAX_WORK
from headrace.verifiers.process_pool import ProcessPool, Reply, ReplyStatus
from headrace.verifiers.slots import Slots
from headrace.verifiers.worker_process import WorkerSpec

MOST_CPU_SECONDS = 2.0 * MAX_WORK / 1e6
"""Of one grading: twice what is counted before it is refused, since machines differ."""
_FAULTS = tuple(
    -number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
)
"""How a process ends that fell over what it computed, and was not killed from outside."""


class MathComponent:
    """Pays 1 for an answer that says what the expected one says."""

    def __init__(self, config: MathConfig) -> None:
        self._config = config
        self._rules = _rules_of(config)
        self.pool = ProcessPool(
            WorkerSpec(
                kind="math",
                num_processes=config.num_processes,
                timeout_seconds=config.timeout_seconds,
                memory_mib=config.memory_mib,
            )
        )

    @property
    def slots(self) -> Slots:
        """The places of gradings in a process."""
        return self.pool.slots

    @property
    def num_workers(self) -> int:
        """See `Resizable`."""
        return self.pool.num_workers

    async def resize(self, num_workers: int) -> None:
        """See `Resizable`."""
        await self.pool.resize(num_workers)

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return 1 where the answer equals the expected one."""
        if prompt.answer is None:
            return no_answer_to_compare(prompt)
        rules = self._rules.get(self._type_of(prompt.metadata))
        if rules is None:
            return no_answer_to_compare(prompt)
        text = find_answer(completion, self._config.extract)
        if text is None or not text.strip():
            return right_or_wrong(right=False, detail="no answer found")
        what = f"{shown(text)} against {shown(prompt.answer)}"
        try:
            judgement = judge(prompt.answer, text, rules, ExactDecider(rules.tolerance))
            score = right_or_wrong(right=judgement.right, detail=f"{what}: {judgement.rule}")
        except NeedsAlgebra:
            score = await self._graded(prompt.answer, text, rules, what)
        except UnreadableGold:
            return no_answer_to_compare(prompt)
        is_asked = rules.form == "worked" and score.reward == 1.0
        if is_asked and repeats_task(prompt.text, prompt.answer, text, rules):
            return right_or_wrong(right=False, detail=f"{what}: says the task again")
        return score

    async def _graded(self, gold: str, answer: str, rules: Rules, what: str) -> Score:
        job = _job(gold, answer, rules)
        reply = await self.pool.call(job)
        if reply.status is ReplyStatus.OOM:
            # Once more, in a process that has computed nothing else.
            reply = await self.pool.call(job)
        if reply.status is not ReplyStatus.OK:
            outcome = _caused_by_answer(reply)
            if outcome is None:
                return failed_score(reply)
            return Score(outcome=outcome, reward=0.0, detail=f"{what}: {reply.detail}")
        if reply.value is None:
            return unscored(f"{shown(gold)} {reply.detail}")
        return right_or_wrong(right=bool(reply.value), detail=f"{what}: {reply.detail}")

    def answer_problem(self, answer: str, columns: Mapping[str, object]) -> str | None:
        """Return why ``answer`` cannot be an expected answer of this row, or None. Blocks."""
        column = self._config.answer_type_column
        if column is not None and column not in columns:
            return f"answer_type_column = {column!r}: the row has no such column"
        declared = self._type_of(columns)
        rules = self._rules.get(declared)
        if rules is None:
            allowed = ", ".join(self._rules)
            return f"{column} = {declared!r}: must be one of {allowed}"
        try:
            gold = read_gold(answer, rules)
        except UnreadableGold as reason:
            return f"{shown(answer)} {reason}"
        if all(value_of(tree) is not None for item in gold.items for tree in trees(item.value)):
            return None
        reply = self.pool.call_blocking(_job(answer, None, rules))
        if reply.status is not ReplyStatus.OK:
            return f"{shown(answer)} could not be checked: {reply.detail}"
        return None if reply.value else f"{shown(answer)} {reply.detail}"

    def _type_of(self, columns: Mapping[str, object]) -> str:
        """Return the answer type that a row declares, or the recipe's."""
        column = self._config.answer_type_column
        declared = None if column is None else columns.get(column)
        return self._config.answer_type if declared is None else str(declared)

    def explain(self, answer: str, completion: str, *, task: str = "") -> list[str]:
        """Return how a verdict comes about, a line a step; the last one says who decides."""
        text = find_answer(completion, self._config.extract)
        lines = [f"extract = {self._config.extract!r} finds {shown(text)}"]
        if text is None or not text.strip():
            return lines
        rules = self._rules[self._config.answer_type]
        lines += explain(answer, text, rules)
        if rules.form == "worked" and repeats_task(task, answer, text, rules):
            lines.append("holds no number but the task's and leaves work to do: wrong")
        return lines

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


def _caused_by_answer(reply: Reply) -> Outcome | None:
    """Return how an answer failed that no process could grade, or None where that is our failure.

    Being left out must not be a policy's choice. What computed for longer than it is allowed to, on
    any machine, and what used up two processes, did so for what it says; what waited did not.
    """
    match reply.status:
        case ReplyStatus.TIMEOUT if reply.cpu_seconds >= MOST_CPU_SECONDS:
            return Outcome.TIMEOUT_CPU
        case ReplyStatus.OOM:
            return Outcome.OOM
        case ReplyStatus.CRASH if reply.exit_status in _FAULTS:
            return Outcome.RUNTIME
        case _:
            return None


def _rules_of(config: MathConfig) -> dict[str, Rules]:
    """Return the rules for each answer type that a row may declare."""
    tolerance = Tolerance(
        absolute=Fraction(config.absolute_tolerance), relative=Fraction(config.relative_tolerance)
    )
    return {
        name: Rules(answer_type=name, units=config.units, form=config.form, tolerance=tolerance)
        for name in get_args(AnswerType)
    }


def _job(gold: str, answer: str | None, rules: Rules) -> dict[str, object]:
    """Return what a grading process is sent; without an answer the expected one is checked."""
    return {"gold": gold, "answer": answer, "rules": rules.to_json()}
