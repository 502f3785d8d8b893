"""From a config to the verifier of a run, to one verdict, and to a check of expected answers.

A registry: which class serves which ``kind``. What a completion is worth is decided in those.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import assert_never

from headrace.config import (
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
from headrace.verifiers.component import Component, RolloutComponent
from headrace.verifiers.exact import ExactComponent
from headrace.verifiers.format import FormatComponent
from headrace.verifiers.function import FunctionComponent
from headrace.verifiers.language import LanguageComponent
from headrace.verifiers.length import LengthComponent
from headrace.verifiers.math import MathComponent, math_answer_problem
from headrace.verifiers.numbers import parse_number
from headrace.verifiers.numeric import NumericComponent
from headrace.verifiers.reward_model import RewardModelComponent
from headrace.verifiers.weighted import WeightedComponent, WeightedVerifier

_DEFAULT_WINDOW = 64


def build_verifier(config: VerifierConfig, *, window: int = _DEFAULT_WINDOW) -> WeightedVerifier:
    """Return the verifier of a run; it starts no process before the first completion.

    ``window``: rollouts of one whole batch, over which ``max_failed_share`` is taken.
    """
    components = {
        name: WeightedComponent(
            component=_build_component(component),
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
    )


def needs_answer(config: VerifierConfig) -> bool:
    """Whether some component compares with an expected answer."""
    return any(_compares(component) for component in config.components.values())


def check_answer(component: ComponentConfig, answer: str) -> str | None:
    """Return why ``component`` could never pay for ``answer``, or None.

    Starts and ends a process where algebra must look; `answer_checker` keeps one for many answers.
    """
    config = VerifierConfig(components={"answer": component.model_copy(update={"weight": 1.0})})
    with answer_checker(config) as check:
        return check(answer)


@contextmanager
def answer_checker(config: VerifierConfig) -> Iterator[Callable[[str], str | None]]:
    """Yield a function that returns why an expected answer is unusable, or None. It blocks."""
    with _math_pools(config) as pools:

        def check(answer: str) -> str | None:
            for name, component in config.components.items():
                problem = _answer_problem(component, answer, pools.get(name))
                if problem is not None:
                    return f"{name}: {problem}"
            return None

        yield check


async def verify_completion(
    config: VerifierConfig, *, prompt: str, answer: str | None, completion: str
) -> Verdict:
    """Return the verdict on one completion that ended by itself."""
    verifier = build_verifier(config, window=1_000_000)
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
            prompt_id="verify", source="verify", text=prompt, token_ids=(0,), answer=answer
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
        case RewardModelConfig():
            return False
        case _:
            assert_never(config)


def _build_component(config: ComponentConfig) -> Component | RolloutComponent:
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
def _math_pools(config: VerifierConfig) -> Iterator[dict[str, MathComponent]]:
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
    config: ComponentConfig, answer: str, component: MathComponent | None
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
            return math_answer_problem(answer, component.pool)
        case JudgeConfig() | RubricConfig() | RewardModelConfig():
            return None
        case FunctionConfig() | FormatConfig() | LengthConfig() | LanguageConfig():
            return None
        case _:
            assert_never(config)
