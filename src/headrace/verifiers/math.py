"""Math answers: caps and spelling here, algebra in killable, memory-capped processes.

The processes run no model code, so the expected answer may go there. A completion that is over a
cap, unreadable or empty is wrong; a process that blew its deadline or died leaves the rollout
unscored, because a failure of our own is not a wrong answer.
"""

from __future__ import annotations

from headrace.config import MathConfig
from headrace.types import Prompt
from headrace.verifiers.component import (
    Score,
    failed_score,
    no_answer_to_compare,
    right_or_wrong,
    shown,
    unscored,
)
from headrace.verifiers.math_spelling import Spelling, same_words, spell
from headrace.verifiers.math_text import find_answer, has_loops, over_cap
from headrace.verifiers.numbers import parse_number
from headrace.verifiers.process_pool import ProcessPool, ReplyStatus, WorkerSpec
from headrace.verifiers.slots import Slots


class MathComponent:
    """Pays 1 for an expression equal to the expected one."""

    def __init__(self, config: MathConfig) -> None:
        self._config = config
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
        """The places of gradings."""
        return self.pool.slots

    async def score(self, prompt: Prompt, completion: str) -> Score:
        """Return 1 where the answer equals the expected one."""
        gold = None if prompt.answer is None else spell(prompt.answer)
        if prompt.answer is None or gold is None:
            return no_answer_to_compare(prompt)
        text = find_answer(completion, self._config.extract)
        what = f"{shown(text)} against {shown(prompt.answer)}"
        if text is None or not text.strip():
            return _wrong("no answer found")
        refused = over_cap(text, loops_allowed=has_loops(prompt.answer))
        if refused is not None:
            return _wrong(f"refused: {refused}")
        answer = spell(text, has_unit=gold.unit != "")
        settled = _settled(gold, answer)
        if answer is None or settled is not None:
            return right_or_wrong(right=bool(settled), detail=what)
        # The spelling can make a power out of "3e99999": what is sent is checked, too.
        refused = over_cap(answer.latex, loops_allowed=has_loops(prompt.answer))
        if refused is not None:
            return _wrong(f"refused: {refused}")
        return await self._graded(gold, answer, what)

    async def _graded(self, gold: Spelling, answer: Spelling, what: str) -> Score:
        reply = await self.pool.call({"gold": gold.latex, "answer": answer.latex})
        if reply.status is not ReplyStatus.OK:
            return failed_score(reply)
        if reply.value == "unreadable gold":
            return unscored(f"the expected answer cannot be read: {what}")
        note = " (unreadable)" if reply.value == "unreadable" else ""
        return right_or_wrong(right=reply.value == "equal", detail=what + note)

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


def math_answer_problem(answer: str, pool: ProcessPool) -> str | None:
    """Return why ``answer`` cannot be an expected answer of `math`, or None. Blocks."""
    gold = spell(answer)
    refused = over_cap(answer, loops_allowed=True)
    if refused is not None:
        return f"{shown(answer)} is refused: {refused}"
    if gold is None:
        return f"{shown(answer)} cannot be read as mathematics: write one LaTeX expression"
    if gold.words is not None or parse_number(gold.latex) is not None:
        return None
    reply = pool.call_blocking({"gold": gold.latex})
    if reply.status is not ReplyStatus.OK:
        return f"{shown(answer)} could not be checked: {reply.detail}"
    if reply.value == "unreadable gold":
        return f"{shown(answer)} cannot be read as mathematics: write one LaTeX expression"
    return None


def _settled(gold: Spelling, answer: Spelling | None) -> bool | None:
    """Return the verdict where text alone decides, or None where algebra must."""
    if answer is None:
        return False
    if answer.unit not in {"", gold.unit} and gold.unit:
        return False
    if gold.words is not None or answer.words is not None:
        return same_words(gold, answer)
    if answer.has_alternatives and not gold.is_list:
        return False
    left, right = parse_number(gold.latex), parse_number(answer.latex)
    return None if left is None or right is None else left == right


def _wrong(detail: str) -> Score:
    return right_or_wrong(right=False, detail=detail)
