"""From a config to the verifier of a run, to one verdict, and to a check of expected answers.

A registry: which class serves which ``kind``. What a completion is worth is decided in those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import assert_never

from headrace.config import (
    CodeConfig,
    ComponentConfig,
    ExactConfig,
    FormatConfig,
    FunctionConfig,
    JudgeConfig,
    LanguageConfig,
    LengthConfig,
    MathConfig,
    NumericConfig,
    RewardModelConfig,
    RubricConfig,
    VerifierConfig,
)
from headrace.errors import ConfigError
from headrace.types import Prompt, Rollout, RolloutGroup, SamplingParams, Verdict
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.code.rows import RowTasks
from headrace.verifiers.component import Component, Measured, RolloutComponent
from headrace.verifiers.exact import ExactComponent
from headrace.verifiers.executors import build_executor
from headrace.verifiers.format import FormatComponent
from headrace.verifiers.function import FunctionComponent
from headrace.verifiers.language import LanguageComponent
from headrace.verifiers.length import LengthComponent
from headrace.verifiers.math.component import MathComponent
from headrace.verifiers.numbers import parse_number
from headrace.verifiers.numeric import NumericComponent
from headrace.verifiers.reward_model import RewardModelComponent
from headrace.verifiers.sandbox.execution import Executor
from headrace.verifiers.weighted import WeightedComponent, WeightedVerifier

AnswerCheck = Callable[[str, Mapping[str, object]], str | None]
"""Takes an expected answer and the columns of its row."""

_DEFAULT_WINDOW = 64


def build_verifier(
    config: VerifierConfig, *, window: int = _DEFAULT_WINDOW, executor: Executor | None = None
) -> WeightedVerifier:
    """Return the verifier of a run; it leaves no process running before the first completion.

    ``window``: rollouts of one whole batch, over which ``max_failed_share`` is taken. ``executor``
    runs the programs that completions hold; None takes the one that ``config`` names, where some
    component needs one. Raises ConfigError where that cannot be.
    """
    if executor is None and runs_code(config):
        executor = build_executor(config)
    components = {
        name: WeightedComponent(
            component=_build_component(component, executor),
            kind=component.kind,
            weight=component.weight,
            require_stop=component.require_stop,
            decides_pass=component.decides_pass,
            gates=component.gates,
            met_at=component.met_at,
        )
        for name, component in config.components.items()
    }
    return WeightedVerifier(
        components,
        pass_threshold=config.pass_threshold,
        max_failed_share=config.max_failed_share,
        window=window,
        measured=_measured(executor),
    )


def _measured(executor: object) -> tuple[Measured, ...]:
    return (executor,) if isinstance(executor, Measured) else ()


def needs_answer(config: VerifierConfig) -> bool:
    """Whether some component compares with an expected answer."""
    return any(_compares(component) for component in config.components.values())


def runs_code(config: VerifierConfig) -> bool:
    """Whether some component runs programs that completions hold."""
    return any(isinstance(part, CodeConfig) for part in config.components.values())


def row_tasks(config: VerifierConfig) -> RowTasks | None:
    """Return what reads tests from rows, where some component runs code."""
    parts = {name: part for name, part in config.components.items() if isinstance(part, CodeConfig)}
    return RowTasks(parts) if parts else None


def check_answer(component: ComponentConfig, answer: str) -> str | None:
    """Return why ``component`` could never pay for ``answer``, or None.

    Starts and ends a process where algebra must look; `answer_checker` keeps one for many answers.
    """
    config = VerifierConfig(components={"answer": component.model_copy(update={"weight": 1.0})})
    with answer_checker(config) as check:
        return check(answer, {})


@contextmanager
def answer_checker(config: VerifierConfig) -> Iterator[AnswerCheck]:
    """Yield a function that returns why an expected answer is unusable, or None. It blocks."""
    with _math_components(config) as math_components:

        def check(answer: str, columns: Mapping[str, object]) -> str | None:
            for name, component in config.components.items():
                math = math_components.get(name)
                problem = _answer_problem(component, answer, columns, math)
                if problem is not None:
                    return f"{name}: {problem}"
            return None

        yield check


async def verify_completion(
    config: VerifierConfig,
    *,
    prompt: str,
    answer: str | None,
    completion: str,
    metadata: Mapping[str, object] | None = None,
    executor: Executor | None = None,
) -> Verdict:
    """Return the verdict on one completion that ended by itself.

    ``metadata`` is the row, for components that read more of it than the answer.
    """
    verifier = build_verifier(config, window=1_000_000, executor=executor)
    rollout = Rollout(
        rollout_index=0,
        completion_ids=(),
        loss_mask=(),
        generator_logprobs=(),
        version_spans=(),
        finish_reason="stop",
        text=completion,
    )
    group = RolloutGroup(
        group_id="0/verify",
        # The verifiers look at text alone; a Prompt cannot be without tokens.
        prompt=Prompt(
            prompt_id="verify",
            source="verify",
            text=prompt,
            token_ids=(0,),
            answer=answer,
            metadata=metadata or {},
        ),
        rollouts=(rollout,),
        sampling=SamplingParams(),
    )
    try:
        return (await verifier.score(group))[0]
    finally:
        await verifier.close()


def _compares(config: ComponentConfig) -> bool:
    match config:
        case ExactConfig() | NumericConfig() | MathConfig():
            return True
        case JudgeConfig() | RubricConfig():
            return config.uses_answer
        case FunctionConfig() | FormatConfig() | LengthConfig() | LanguageConfig():
            return False
        case RewardModelConfig() | CodeConfig():
            return False
        case _:
            assert_never(config)


def _build_component(  # noqa: C901 - one branch for each kind
    config: ComponentConfig, executor: Executor | None
) -> Component | RolloutComponent:
    built: Component | RolloutComponent
    match config:
        case ExactConfig():
            built = ExactComponent(config)
        case NumericConfig():
            built = NumericComponent(config)
        case MathConfig():
            built = MathComponent(config)
        case FunctionConfig():
            built = FunctionComponent(config)
        case CodeConfig():
            assert executor is not None, "made above for a config that runs code"
            built = CodeComponent(config, executor)
        case FormatConfig():
            built = FormatComponent(config)
        case LengthConfig():
            built = LengthComponent(config)
        case LanguageConfig():
            built = LanguageComponent(config)
        case JudgeConfig() | RubricConfig():
            built = _build_judge(config)
        case RewardModelConfig():
            built = RewardModelComponent(config)
        case _:
            assert_never(config)
    return built


def _build_judge(config: JudgeConfig | RubricConfig) -> Component:
    """Return the judge with its key. Raises ConfigError if the environment does not hold it."""
    from headrace.verifiers.judge.component import JudgeComponent  # noqa: PLC0415 - an extra

    variable = config.api_key_variable
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        msg = f'api_key_variable = "{variable}": the environment does not hold it'
        raise ConfigError(msg)
    return JudgeComponent(config, key)


@contextmanager
def _math_components(config: VerifierConfig) -> Iterator[dict[str, MathComponent]]:
    parts = {
        name: MathComponent(part)
        for name, part in config.components.items()
        if isinstance(part, MathConfig)
    }
    try:
        yield parts
    finally:
        for part in parts.values():
            part.pool.close_blocking()


def _answer_problem(
    config: ComponentConfig,
    answer: str,
    columns: Mapping[str, object],
    component: MathComponent | None,
) -> str | None:
    match config:
        case ExactConfig():
            return None if answer.strip() or not config.strip else "the expected answer is empty"
        case NumericConfig():
            is_number = parse_number(answer) is not None
            return (
                None
                if is_number
                else f"{answer[:80]!r} is no number; write it as in 1,234.5 or 3/4"
            )
        case MathConfig():
            assert component is not None
            return component.answer_problem(answer, columns)
        case JudgeConfig() | RubricConfig() | RewardModelConfig() | CodeConfig():
            return None
        case FunctionConfig() | FormatConfig() | LengthConfig() | LanguageConfig():
            return None
        case _:
            assert_never(config)
