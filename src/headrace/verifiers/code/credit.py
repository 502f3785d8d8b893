"""What a program is paid for the tests that it passes.

Owns: a test without a result is not passed, and a failure of the sandbox is no score. What a test
says of an execution is decided in `judging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from headrace.config import CodeConfig
from headrace.types import Outcome
from headrace.verifiers.code.judging import TestResult
from headrace.verifiers.code.task import CodeTest
from headrace.verifiers.component import Score, unscored

VISIBLE_ONLY = "passes_visible_only"
"""Label of a program that passes every visible test and none of those held out that were run."""


def is_settled(result: TestResult, config: CodeConfig) -> bool:
    """Whether no further test can change what is paid."""
    if result.outcome is Outcome.INFRA:
        return True
    return config.stop_when_settled and not result.passed and _forfeits(result, config)


def score_of(results: Sequence[TestResult], tests: Sequence[CodeTest], config: CodeConfig) -> Score:
    """Return what ``results``, of some or all of ``tests``, are worth."""
    failed = [result for result in results if not result.passed]
    broken = [result for result in failed if result.outcome is Outcome.INFRA]
    failed = [result for result in failed if result.outcome is not Outcome.INFRA]
    # What a program has lost by itself, no failure of ours gives back.
    if broken and not any(_forfeits(result, config) for result in failed):
        return unscored(f"test {broken[0].test.test_id}: {broken[0].detail}")
    reward = _reward(results, tests, config)
    passed = sum(result.passed for result in results)
    detail = f"{passed} of {len(tests)} tests passed"
    if failed:
        first = failed[0]
        detail += f"; test {first.test.test_id}: {first.outcome}: {first.detail}"
    tiers = ", ".join(sorted({result.tier for result in results}))
    outcome = failed[0].outcome if failed else Outcome.PASS
    return Score(
        outcome=outcome, reward=reward, detail=f"{detail} [{tiers}]", labels=_labels(results)
    )


def _forfeits(result: TestResult, config: CodeConfig) -> bool:
    """Whether this failed test alone makes the reward 0."""
    match config.credit:
        case "all":
            return True
        case "share":
            return False
        case "visible_then_heldout":
            return result.test.visible
        case _:
            assert_never(config.credit)


def _labels(results: Sequence[TestResult]) -> tuple[str, ...]:
    """Note a program that knows what the prompt shows and nothing else; a hint, not a proof."""
    visible = [result.passed for result in results if result.test.visible]
    heldout = [result for result in results if not result.test.visible]
    wrong = any(result.outcome is Outcome.WRONG for result in heldout)
    only = bool(visible) and all(visible) and wrong and not any(r.passed for r in heldout)
    return (VISIBLE_ONLY,) if only else ()


def _reward(results: Sequence[TestResult], tests: Sequence[CodeTest], config: CodeConfig) -> float:
    """Return what is paid. A test without a result counts as not passed."""
    num_graded = sum(not test.visible for test in tests)
    num_passed = sum(result.passed and not result.test.visible for result in results)
    match config.credit:
        case "all":
            return float(len(results) == len(tests) and all(result.passed for result in results))
        case "share":
            return num_passed / num_graded
        case "visible_then_heldout":
            visible = [result for result in results if result.test.visible]
            return num_passed / num_graded if all(r.passed for r in visible) else 0.0
        case _:
            assert_never(config.credit)
