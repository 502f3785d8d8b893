"""The value head: a linear layer on the policy's last hidden states, and its part of a checkpoint.

Owns: it starts at 0, so that at first advantages are returns and the policy's own layers feel
nothing of it. It is no part of the policy: never exported, and in a checkpoint in a file of its
own beside the Hugging Face directory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CRITIC_FILE = "critic.safetensors"
HEAD_PREFIX = "value_head."
"""Of the names that its parameters have among those that are trained."""


class ValueHead(nn.Module):
    """V = w h + b, in the dtype of its parameters whatever the policy computes in."""

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [N] the values of ``hidden`` [N, hidden], each computed once."""
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.to(self.weight.dtype) @ self.weight + self.bias


def named_parameters(head: ValueHead | None) -> dict[str, nn.Parameter]:
    """Return the head's parameters by the names the optimizer has for them; none without one."""
    if head is None:
        return {}
    return {f"{HEAD_PREFIX}{name}": parameter for name, parameter in head.named_parameters()}


def save_head(directory: Path, head: ValueHead) -> None:
    """Write the weights. Raises OSError or SafetensorError."""
    save_file({name: p.detach() for name, p in head.named_parameters()}, directory / CRITIC_FILE)


def read_head(directory: Path, head: ValueHead) -> dict[str, Tensor]:
    """Return the weights that `save_head` wrote.

    Raises OSError, SafetensorError, or ValueError where they do not fit ``head``.
    """
    tensors = load_file(directory / CRITIC_FILE)
    expected = {name: parameter.shape for name, parameter in head.named_parameters()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        msg = f"{CRITIC_FILE} does not fit the model's {len(head.weight)} hidden states"
        raise ValueError(msg)
    return tensors
