"""AdamW, its learning rate, and the one place where parameters change.

Owns: an update whose gradient is not finite changes no parameter and no optimizer state. The
schedule is a function of the number of updates really made, so it has no state of its own. Does
not count skipped updates or stop a run: the learner does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.config import OptimizerConfig

_FACTOR = "learning_rate_factor"
"""Key of a parameter group whose rate is not the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """What `apply_update` did."""

    gradient_norm: float
    """Global L2 norm before clipping; not finite exactly when ``applied`` is False."""
    applied: bool
    """Whether parameters and optimizer state moved."""


def build_optimizer(
    parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Return AdamW over the trainable ``(name, parameter)`` pairs.

    Vectors (norms, biases) are not decayed. Raises ValueError when nothing is trainable.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    decayed = [(name, parameter) for name, parameter in trainable if parameter.ndim > 1]
    vectors = [(name, parameter) for name, parameter in trainable if parameter.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if not trainable:
        msg = "no parameter requires a gradient, so there is nothing to optimize"
        raise ValueError(msg)
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )
    _begin(optimizer, trainable)
    return optimizer


def add_faster(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]], factor: float
) -> None:
    """Let it update ``(name, parameter)`` pairs too, undecayed, at ``factor`` times its rate."""
    named = [*parameters]
    group = {"params": named, "weight_decay": 0.0, _FACTOR: factor}
    _begin(optimizer, named)
    optimizer.add_param_group(group)


def _begin(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Parameter]]) -> None:
    """Give each parameter the state of no update, all of it in memory that was written to.

    Left to the first update, it would take the memory that the first step computed in, and the
    second step would wait for the machine to give it other memory.
    """
    for _, parameter in parameters:
        first, second = (torch.empty_like(parameter, requires_grad=False) for _ in range(2))
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": first.zero_(),
            "exp_avg_sq": second.zero_(),
        }


def loss_scale(weights: Sequence[float]) -> float:
    """Return the power of two to multiply a loss by whose gradient is computed in float16.

    So that the largest of ``weights``, what a token counts, becomes 1 or a little less: gradients
    of single tokens then lie in the middle of what float16 can hold, however large the batch is. A
    power of two is taken back without a rounding. 1 where there is no weight.
    """
    largest = max(weights, default=0.0)
    return 2.0 ** math.floor(-math.log2(largest)) if largest > 0.0 else 1.0


def learning_rate(config: OptimizerConfig, update_index: int, num_updates: int) -> float:
    """Return the rate of the update that follows ``update_index`` updates really made.

    Warm-up gives its k-th update (from 1) k / num_warmup_updates of the peak, so that no update
    is spent at rate 0. ``linear`` and ``cosine`` then fall from the peak and are exactly 0 once
    ``num_updates``, the run's planned total, have been made: the last update still moves.
    """
    warmup = config.num_warmup_updates
    if config.schedule != "constant" and update_index >= num_updates:
        return 0.0
    if update_index < warmup:
        return config.learning_rate * (update_index + 1) / warmup
    progress = (update_index - warmup) / max(num_updates - warmup, 1)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1.0 - progress)
        case "cosine":
            return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(config.schedule)


def apply_update(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Parameter],
    *,
    max_norm: float,
    learning_rate: float,
    norm: float | None = None,
) -> UpdateOutcome:
    """Clip the global gradient norm to ``max_norm``, step once, and clear the gradients.

    A norm that is NaN or infinite clears the gradients and changes nothing else: clipping would
    only spread the NaN. Every trainable parameter of ``optimizer`` must be in ``parameters``.
    ``norm`` is that of the gradient where these are only a part of it; None: it is computed.
    """
    norm = _global_norm(parameters) if norm is None else norm
    applied = math.isfinite(norm)
    if applied:
        if norm > max_norm:
            _scale_gradients(parameters, max_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get(_FACTOR, 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return UpdateOutcome(gradient_norm=norm, applied=applied)


def _gradients(parameters: Sequence[Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _global_norm(parameters: Sequence[Parameter]) -> float:
    return float(torch.nn.utils.get_total_norm(_gradients(parameters)))


def _scale_gradients(parameters: Sequence[Parameter], factor: float) -> None:
    torch._foreach_mul_(_gradients(parameters), factor)
