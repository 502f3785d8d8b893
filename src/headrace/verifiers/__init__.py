"""Verifiers: what a rollout is paid for.

Owns: a verdict is never a silent 0. Whatever goes wrong on our side leaves the reward None, with
the reason. No torch and no algebra in this process: flint lives in `math.algebra`, which only a
killable worker imports.

The public names are looked up on first use: a worker imports this package too, and reading the
whole config would triple the time of its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.verifiers.build import (
        AnswerCheck,
        answer_checker,
        build_verifier,
        check_answer,
        needs_answer,
        row_tasks,
        runs_code,
        verify_completion,
    )
    from headrace.verifiers.executors import build_executor
    from headrace.verifiers.explaining import explain_completion
    from headrace.verifiers.function import check_function
    from headrace.verifiers.numbers import parse_number
    from headrace.verifiers.reward_model import check_reward_model
    from headrace.verifiers.weighted import WeightedVerifier

__all__ = [
    "AnswerCheck",
    "WeightedVerifier",
    "answer_checker",
    "build_executor",
    "build_verifier",
    "check_answer",
    "check_function",
    "check_reward_model",
    "explain_completion",
    "needs_answer",
    "parse_number",
    "row_tasks",
    "runs_code",
    "verify_completion",
]

_ELSEWHERE = {
    "WeightedVerifier": "weighted",
    "build_executor": "executors",
    "check_function": "function",
    "check_reward_model": "reward_model",
    "explain_completion": "explaining",
    "parse_number": "numbers",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = import_module(f"{__name__}.{_ELSEWHERE.get(name, 'build')}")
    return getattr(module, name)
