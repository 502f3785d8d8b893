from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.bench.generate_agreement import sample
from headrace.bench.mismatch import WORKLOAD, compare, mismatch_of
from headrace.models.checkpoint import load_decoder

SMALL = replace(WORKLOAD, num_groups=3, group_size=2, num_prompt_tokens=20, num_new_tokens=9)
FIGURES = ("k1", "k3", "max_gap", "ess", "clip_share")


def test_the_formats_disagree_by_their_digits(tiny_model: Path) -> None:
    figures = mismatch_of(tiny_model, "tiny", SMALL, lambda _: None)
    formats = ("fp32", "bf16", "fp16")
    assert set(figures) == {
        f"tiny_{engine}_{learner}_{figure}"
        for engine in formats
        for learner in formats
        for figure in FIGURES
    }
    gap = {key: figures[f"tiny_{key}_max_gap"] for key in ("fp32_fp32", "fp16_fp16", "bf16_bf16")}
    assert gap["fp32_fp32"] < 1e-5 < gap["fp16_fp16"] < gap["bf16_bf16"]
    assert figures["tiny_fp32_fp32_ess"] == pytest.approx(1.0, abs=1e-6)
    assert figures["tiny_fp32_fp32_clip_share"] == 0.0


def test_the_figures_are_those_of_the_differences(tiny_model: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32)
    groups = asyncio.run(sample(replace(SMALL, model=str(tiny_model), dtype="float32"), decoder))
    shift = 0.3
    shifted = [
        replace(
            group,
            rollouts=tuple(
                replace(r, generator_logprobs=tuple(lp - shift for lp in r.generator_logprobs))
                for r in group.rollouts
            ),
        )
        for group in groups
    ]
    found = compare(decoder, shifted, torch.float32)
    assert found["k1"] == pytest.approx(-shift, abs=1e-4)
    assert found["k3"] == pytest.approx(math.exp(shift) - 1 - shift, abs=1e-4)
    assert found["max_gap"] == pytest.approx(shift, abs=1e-4)
    assert found["ess"] == pytest.approx(1.0, abs=1e-5)
    assert found["clip_share"] == 1.0
