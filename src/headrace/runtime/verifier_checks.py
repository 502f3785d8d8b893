"""What can be known to be wrong with a verifier's components before the first rollout."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

from headrace.config import (
    CodeConfig,
    ComponentConfig,
    FunctionConfig,
    JudgeConfig,
    RewardModelConfig,
    RubricConfig,
    VerifierConfig,
)
from headrace.config.sglang_rules import is_api_key
from headrace.errors import ConfigError
from headrace.verifiers import check_function, check_reward_model


def check_component(name: str, component: ComponentConfig) -> None:
    """Check what ``component`` needs of this machine. Raises ConfigError."""
    where = f"verifier.components.{name}"
    match component:
        case FunctionConfig():
            _check_function(where, component)
        case RewardModelConfig():
            _check_reward_model(where, component)
        case JudgeConfig() | RubricConfig():
            _check_judge(where, component)
        case _:
            return


def isolation_note(config: VerifierConfig) -> str | None:
    """Try the sandbox of this machine and return how it isolates; None where nothing needs it.

    Raises ConfigError where code cannot be isolated as asked, or in a language that is not known.
    """
    parts = {name: c for name, c in config.components.items() if isinstance(c, CodeConfig)}
    if not parts or config.remote is not None:
        return None
    known = ("python", *config.sandbox.languages)
    problems = [
        f'verifier.components.{name}.language = "{part.language}": must be one of '
        f"{', '.join(known)}; verifier.sandbox.languages adds others"
        for name, part in parts.items()
        if part.language not in known
    ]
    if problems:
        raise ConfigError(*problems)
    from headrace.verifiers.sandbox.tiers import choose_tier  # noqa: PLC0415 - needs Linux

    tier = choose_tier(config.sandbox)
    return f"programs of completions run in isolation of the tier {tier.value} (docs/SANDBOX.md)"


def component_notes(name: str, component: ComponentConfig) -> Iterator[str]:
    """Yield what is worth knowing of a component before the run and no reason to refuse it."""
    match component:
        case JudgeConfig() | RubricConfig():
            from headrace.verifiers.judge.reach import why_unreachable  # noqa: PLC0415 - an extra

            variable = component.api_key_variable
            why = why_unreachable(component, None if variable is None else os.environ[variable])
            if why is not None:
                yield f"verifier.components.{name}: {why}"
        case _:
            return


def _check_function(where: str, component: FunctionConfig) -> None:
    """Import the reward function within the limits that it will have."""
    try:
        check_function(component.path, memory_mib=component.memory_mib)
    except ConfigError as error:
        limit = f"its processes have memory_mib = {component.memory_mib}"
        hint = f"; {limit}, raise it" if "MemoryError" in str(error) else ""
        raise ConfigError(*(f"{where}: {problem}{hint}" for problem in error.problems)) from error


def _check_reward_model(where: str, component: RewardModelConfig) -> None:
    """Load the reward model as it will be loaded."""
    try:
        check_reward_model(component)
    except ConfigError as error:
        raise ConfigError(*(f"{where}: {problem}" for problem in error.problems)) from error


def _check_judge(where: str, component: JudgeConfig | RubricConfig) -> None:
    problems = []
    if importlib.util.find_spec("httpx2") is None:
        problems.append(f"{where}: httpx2 is not installed; install headrace[judge]")
    variable = component.api_key_variable
    if variable is not None and not os.environ.get(variable):
        problems.append(
            f'{where}.api_key_variable = "{variable}": the environment does not hold it; export '
            "the key under that name"
        )
    elif variable is not None and not is_api_key(os.environ[variable]):
        # Never quoted: the recipe's faults are printed and sent on.
        problems.append(
            f'{where}.api_key_variable = "{variable}": the key in it holds a space, a line break '
            "or another character that no HTTP header takes; export it without"
        )
    if problems:
        raise ConfigError(*problems)
