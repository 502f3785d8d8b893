"""What a value function loses by being away from its target."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    targets: Tensor,
    *,
    loss_mask: Tensor,
    values_before: Tensor | None = None,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (V - target)^2 / 2 [N], differentiable in ``values``, and where a clip took over.

    With ``clip`` it is the larger of that and the same of V held within ``clip`` of
    ``values_before``, as in the PPO of OpenAI's baselines: a value that has left that
    range away from where it was has no gradient unless its target lies the other way. A cell
    outside ``loss_mask`` is 0 and has no gradient, whatever it held.
    """
    zero = values.new_zeros(())
    away = torch.where(loss_mask, values - targets.detach(), zero)
    plain = away.square() / 2
    if clip is None:
        return plain, torch.zeros_like(loss_mask)
    assert values_before is not None
    before = values_before.detach()
    moved = values.detach() - before
    held = before + moved.clamp(-clip, clip)
    other = torch.where(loss_mask, held - targets.detach(), zero).square() / 2
    # Where V is within range both are the same but for rounding, and the gradient is V's.
    clipped = loss_mask & (moved.abs() > clip) & (other > plain.detach())
    return torch.where(clipped, other, plain), clipped
