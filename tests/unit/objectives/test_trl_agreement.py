"""Losses and weights against TRL's own loss function, called on made-up log-probs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.objectives.aggregation import Aggregation, aggregate_loss, aggregation_weights
from headrace.objectives.importance import importance_weights
from headrace.objectives.kl import k3
from headrace.objectives.losses import cispo, masked_log_ratio, ppo_clip, sapo
from headrace.objectives.segments import Segments
from headrace.objectives.sequence_losses import gmpo, gspo

grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

ROWS, WIDTH, LONGEST = 6, 7, 9
LENGTHS = (7, 1, 4, 5, 2, 7)


class OneProcess:
    """Stands in for accelerate where there is one process."""

    num_processes = 1

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass
class Trainer:
    """What TRL's loss reads of its trainer."""

    logprobs: Tensor
    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.3
    delta: float | None = None
    beta: float = 0.0
    use_vllm: bool = False
    aux_loss_enabled: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    vllm_importance_sampling_correction: bool = True
    current_gradient_accumulation_steps: int = 1
    max_completion_length: int = LONGEST
    _entropy_bonus_enabled: bool = False
    accelerator: OneProcess = field(default_factory=OneProcess)
    _metrics: Any = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    model: Any = field(default_factory=lambda: SimpleNamespace(training=True))

    @property
    def args(self) -> SimpleNamespace:
        return SimpleNamespace(
            delta=self.delta,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )

    def _get_per_token_logps_and_entropies(
        self, *_: object, **__: object
    ) -> tuple[Tensor, Tensor, None]:
        return self.logprobs, torch.zeros_like(self.logprobs), None


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    proximal = -random(ROWS, WIDTH).abs() - 0.2
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    mask = (torch.arange(WIDTH) < lengths).long()
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    sampled = proximal + 0.3 * random(ROWS, WIDTH)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.7, 0.4, -1.2, 0.9, -0.3], dtype=torch.float64),
        "old_per_token_logps": proximal,
        "ref_per_token_logps": proximal + 0.2 * random(ROWS, WIDTH),
        "logprobs": (proximal + 0.4 * random(ROWS, WIDTH)).requires_grad_(),
        "sampled": sampled,
        "num_items_in_batch": mask.sum(),
    }


Objective = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


def own_loss(
    inputs: dict[str, Tensor],
    objective: Objective,
    aggregation: Aggregation,
    kl_coefficient: float = 0.0,
    correction_high: float | None = None,
) -> Tensor:
    """Return this project's loss of the same numbers, flat."""
    mask = inputs["completion_mask"].bool().flatten()
    index = torch.arange(ROWS).repeat_interleave(WIDTH)
    segments = Segments(index=index, count=ROWS, loss_mask=mask)
    q, p = inputs["logprobs"].flatten(), inputs["old_per_token_logps"].flatten()
    value = objective(q, p, inputs["advantages"][index], segments)
    if correction_high is not None:
        found = importance_weights(
            p - inputs["sampled"].flatten(),
            segments=segments,
            level="token",
            mode="truncate",
            low=0.0,
            high=correction_high,
        )
        value = found.weights * value
    reference = inputs["ref_per_token_logps"].flatten()
    value = value - kl_coefficient * k3(q, reference, loss_mask=mask)
    weights = aggregation_weights(LENGTHS, aggregation=aggregation, max_tokens=LONGEST)
    per_rollout = torch.tensor(weights, dtype=torch.float64)
    return aggregate_loss(value, weights=per_rollout, rollout_index=index, loss_mask=mask)


def of_ppo(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return ppo_clip(ratio, a, loss_mask=s.loss_mask, clip_low=0.2, clip_high=0.3)[0]


def of_dual_clip(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return ppo_clip(ratio, a, loss_mask=s.loss_mask, clip_low=0.2, clip_high=0.3, dual_clip=1.4)[0]


def of_cispo(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return cispo(q, ratio, a, loss_mask=s.loss_mask, min_ratio=0.0, max_ratio=1.2)[0]


def of_sapo(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return sapo(ratio, a, loss_mask=s.loss_mask, tau_positive=1.0, tau_negative=1.05)[0]


def of_gspo(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return gspo(ratio, a, segments=s, clip_low=0.2, clip_high=0.3, level="sequence")[0]


def of_gmpo(q: Tensor, p: Tensor, a: Tensor, s: Segments) -> Tensor:
    ratio = masked_log_ratio(q, p, loss_mask=s.loss_mask)
    return gmpo(ratio, a, segments=s, clip_low=0.2, clip_high=0.3)[0]


CASES: list[tuple[dict[str, Any], Objective, Aggregation]] = [
    ({"loss_type": "grpo"}, of_ppo, "sequence"),
    ({"loss_type": "dapo"}, of_ppo, "token"),
    ({"loss_type": "dr_grpo"}, of_ppo, "constant"),
    ({"loss_type": "grpo", "delta": 1.4}, of_dual_clip, "sequence"),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, of_cispo, "token"),
    ({"loss_type": "sapo"}, of_sapo, "sequence"),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, of_gspo, "sequence"),
]


def agree(found: Tensor, expected: Tensor, logprobs: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, logprobs)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("settings", "objective", "aggregation"), CASES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_loss_and_gradient_are_those_of_trl(
    settings: dict[str, Any],
    objective: Objective,
    aggregation: Aggregation,
    beta: float,
    inputs: dict[str, Tensor],
) -> None:
    trainer = Trainer(logprobs=inputs["logprobs"], beta=beta, **settings)
    expected = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    agree(own_loss(inputs, objective, aggregation, beta), expected, inputs["logprobs"])


def test_truncated_weights_of_tokens_are_those_of_trl(inputs: dict[str, Tensor]) -> None:
    gaps = inputs["old_per_token_logps"] - inputs["sampled"]
    inputs["importance_sampling_ratio"] = gaps.exp().clamp(max=1.2)
    trainer = Trainer(logprobs=inputs["logprobs"], use_vllm=True, beta=0.1)
    inputs["sampling_per_token_logps"] = inputs["sampled"]
    expected = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    agree(own_loss(inputs, of_ppo, "sequence", 0.1, 1.2), expected, inputs["logprobs"])


def test_the_geometric_mean_is_that_of_trls_gmpo(inputs: dict[str, Tensor]) -> None:
    module = pytest.importorskip("trl.experimental.gmpo.gmpo_trainer")
    trainer = Trainer(logprobs=inputs["logprobs"])
    expected = module.GMPOTrainer._compute_loss(trainer, None, inputs)
    agree(own_loss(inputs, of_gmpo, "sequence"), expected, inputs["logprobs"])
