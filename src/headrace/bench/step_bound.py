"""The least time of a step: its floating-point operations at the speed of this machine's products.

Counted is the work that has to be done: each prompt once for its group, in sampling and in
training, one forward pass for each sampled token, three times the forward pass for each token
trained on, and the output layer where a token is sampled or predicted. Not counted: attention,
norms and all else that is no product with a weight matrix, about 2 % here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.types import RolloutGroup

if TYPE_CHECKING:
    import torch

    from headrace.models.decoder_config import DecoderConfig

_SIDE = 2048
_REPETITIONS = 7


def step_operations(config: DecoderConfig, groups: Sequence[RolloutGroup]) -> float:
    """Return the floating-point operations of sampling ``groups`` and training on all of them."""
    body = 2.0 * _body_weights(config)
    head = 2.0 * config.vocab_size * config.hidden_size
    prompts = sum(len(group.prompt.token_ids) for group in groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = sum(len(rollout.completion_ids) for rollout in rollouts)
    # The last token of a rollout is fed to nothing, neither in sampling nor in training.
    fed = prompts + sampled - len(rollouts)
    return (1.0 + 3.0) * (body * fed + head * sampled)


def _body_weights(config: DecoderConfig) -> int:
    """Return the numbers in the matrices of all layers."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    per_layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * per_layer


def operations_per_second(dtype: torch.dtype, num_threads: int) -> float:
    """Return the speed of a large square product, the best of some."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    left, right = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
    out = left @ right
    seconds = []
    for _ in range(_REPETITIONS):
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(before)
    return 2.0 * _SIDE**3 / min(seconds)
