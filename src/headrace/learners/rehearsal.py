"""The largest micro-batch that a recipe allows, tried before the first step.

Owns: what does not fit in memory is known at the start and not hours later, when the first long
batch comes. Nothing of the attempt stays: no weight, no gradient, no counter.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from headrace.config import RunConfig
from headrace.errors import RunError
from headrace.learners.packing import Microbatch, microbatches
from headrace.learners.selection import TrainingGroup, TrainingRow, plain_rollout

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory")


def largest_microbatch(
    config: RunConfig, *, longest_prompt: int, device: torch.device
) -> Microbatch:
    """Return a micro-batch as large as one of the run can be.

    As many of the longest groups as one step has and the token budget takes. A rollout that is
    longer than the budget is one too.
    """
    length = config.sampling.max_tokens
    per_group = longest_prompt + config.group_size * length
    budget = config.learner.max_tokens_per_microbatch
    count = min(config.groups_per_step, budget // per_group + 1)
    group = _longest_group(longest_prompt, length, config.group_size)
    batches = microbatches([group] * count, max_tokens=budget, device=device)
    return max(batches, key=lambda batch: len(batch.input_ids))


def rehearse(
    batch: Microbatch,
    config: RunConfig,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], None],
) -> None:
    """Let ``backward`` compute the gradient of ``batch``, and forget it.

    Raises RunError, with what to lower, where the device refuses memory.
    """
    try:
        backward()
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise _too_large(batch, config, error) from error
    finally:
        optimizer.zero_grad(set_to_none=True)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether ``error`` says that memory was refused; a processor's has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or bool(_NO_MEMORY.search(str(error)))


def _too_large(batch: Microbatch, config: RunConfig, error: RuntimeError) -> RunError:
    """Return an error that says what did not fit, and what to lower."""
    budget, tokens = config.learner.max_tokens_per_microbatch, len(batch.input_ids)
    longest = max(batch.prompt_lengths) + config.sampling.max_tokens
    lower = [f"sampling.max_tokens (now {config.sampling.max_tokens})", "data.max_prompt_tokens"]
    if longest < budget:
        lower.insert(0, f"learner.max_tokens_per_microbatch (now {budget})")
    ways = f"lower {' or '.join(lower)}"
    if not config.learner.activation_checkpointing:
        ways += ", or set learner.activation_checkpointing = true"
    msg = (
        f"the largest micro-batch of this recipe does not fit in memory: {tokens} tokens in "
        f"{len(batch.rows)} rollouts of up to {longest}; {ways}. "
        f"The device said: {str(error).splitlines()[0]}"
    )
    return RunError(msg)


def _longest_group(prompt: int, length: int, size: int) -> TrainingGroup:
    """Return a group of the longest rollouts, of a token that every vocabulary has."""
    rollout = plain_rollout(length)
    row = TrainingRow(rollout=rollout, advantage=1.0, weight=1.0 / length, reward=1.0)
    return TrainingGroup(prompt_ids=(0,) * prompt, rows=(row,) * size)
