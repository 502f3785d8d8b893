from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.bench.generate_agreement import WORKLOAD, agreement
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine.forms import can_multiply_int8
from headrace.types import GenerationRequest, RolloutGroup

SMALL = replace(WORKLOAD, num_groups=3, group_size=2, num_prompt_tokens=20, num_new_tokens=9)


def test_a_small_models_log_probs_are_those_of_transformers_and_of_the_learner(
    tiny_model: Path,
) -> None:
    has_int8 = can_multiply_int8(torch.device("cpu"))
    dtypes = ("float32", "bfloat16", *(["int8"] if has_int8 else []))
    figures = agreement(tiny_model, dtypes=dtypes, plan=SMALL)
    assert set(figures) == {
        f"agreement_{kind}_{stat}"
        for kind in ("hf_fp32", "hf_bf16", "learner_fp32", "learner_bf16", "learner_int8")
        if has_int8 or not kind.endswith("int8")
        for stat in ("mean", "max")
    }
    assert 0 <= figures["agreement_hf_fp32_mean"] <= figures["agreement_hf_fp32_max"] < 1e-5
    assert 0 <= figures["agreement_learner_fp32_mean"] <= figures["agreement_learner_fp32_max"]
    assert figures["agreement_learner_fp32_max"] < 1e-5
    assert 1e-4 < figures["agreement_hf_bf16_mean"] < 0.2
    assert 1e-4 < figures["agreement_learner_bf16_mean"] < 0.2
    if has_int8:  # else engines refuse it
        assert 1e-4 < figures["agreement_learner_int8_mean"] < 0.2


def test_one_log_prob_that_is_wrong_is_the_largest_difference(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_really = TorchGenerator.generate

    async def spoilt(
        self: TorchGenerator, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[RolloutGroup]:
        async for group in generate_really(self, requests):
            first, *others = group.rollouts
            logprobs = (first.generator_logprobs[0] - 0.5, *first.generator_logprobs[1:])
            rollouts = (replace(first, generator_logprobs=logprobs), *others)
            yield replace(group, rollouts=rollouts) if group.group_id == "1" else group

    monkeypatch.setattr(TorchGenerator, "generate", spoilt)
    figures = agreement(tiny_model, dtypes=("float32",), plan=SMALL)
    for kind in ("hf", "learner"):
        assert figures[f"agreement_{kind}_fp32_max"] == pytest.approx(0.5, abs=1e-4)
        assert figures[f"agreement_{kind}_fp32_mean"] == pytest.approx(0.5 / (3 * 2 * 9), abs=1e-4)
