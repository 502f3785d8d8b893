"""What vLLM samples is what headrace's own decoder says it sampled."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_lab import VllmLab, collect

from headrace.generators.vllm import VllmGenerator


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    ],
    ids=str,
)
def test_groups_come_with_the_logprobs_of_the_distribution_sampled_from(
    lab: VllmLab, shared: VllmGenerator, sampling: dict[str, Any]
) -> None:
    update = lab.update(seed=1)
    lab.run(shared.update_weights(update))
    request = lab.request(size=8, **sampling)
    (group,) = lab.run(collect(shared, [request])).values()
    assert [rollout.rollout_index for rollout in group.rollouts] == list(range(8))
    for rollout in group.rollouts:
        assert len(rollout.completion_ids) == 20
        assert rollout.finish_reason == "length"
        assert all(rollout.loss_mask)
        expected = lab.logprobs(update.tensors, request.prompt.token_ids, rollout, **sampling)
        assert rollout.generator_logprobs == pytest.approx(expected, abs=2e-4)
    assert len({rollout.completion_ids for rollout in group.rollouts}) > 1
