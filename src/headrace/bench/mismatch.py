"""`bench mismatch`: how far generator and learner disagree, by the number format of each.

Measured: rollouts of random prompts, so that the distributions are wide, sampled by the torch
engine in fp32, bf16 and fp16, and the same tokens under the learner's forward pass with products in
each of the three over the same fp32 masters. Of each pair, over the sampled tokens: ``k1`` and
``k3`` (estimates of KL(generator || learner) a token, nats), ``max_gap`` (largest difference of
log-probs), ``ess`` (effective share of the tokens under their weights e^d) and ``clip_share``
(ratios further than 0.2 from 1, which PPO's clip bounds for one sign of the advantage). Names are
MODEL_GENERATOR_LEARNER_FIGURE. Not measured: speed, or what a mismatch does to training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.generate_agreement import sample
from headrace.bench.generate_records import GeneratePlan
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.errors import ModelError
from headrace.models.catalogue import resolve_model
from headrace.types import RolloutGroup

if TYPE_CHECKING:
    import torch

    from headrace.models.decoder import Decoder

FORMATS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MODELS = ("nano", "smollm2-135m")
WORKLOAD = GeneratePlan(engine="headrace", model="", num_groups=4, group_size=4)

_CLIP = 0.2


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Measure both models; one that was not fetched is left out, and said so."""
    figures: dict[str, float] = {}
    for name in MODELS:
        try:
            model = resolve_model(name)
        except ModelError as error:
            progress(f"{error}; its figures are left out")
            continue
        figures |= mismatch_of(model, name.partition("-")[0], WORKLOAD, progress)
    return figures


def mismatch_of(model: Path, name: str, plan: GeneratePlan, progress: Progress) -> Figures:
    """Return the figures of one checkpoint."""
    import torch

    from headrace.models.checkpoint import load_decoder

    masters = load_decoder(model, torch.float32)
    # Prompt and completion fit, whatever the model's context is.
    half = masters.config.max_positions // 2
    plan = replace(
        plan,
        model=str(model),
        num_prompt_tokens=min(plan.num_prompt_tokens, half),
        num_new_tokens=min(plan.num_new_tokens, half),
    )
    figures: dict[str, float] = {}
    for short, dtype in FORMATS.items():
        progress(f"{name}: sampling in {short}")
        engine = load_decoder(model, getattr(torch, dtype))
        groups = asyncio.run(sample(replace(plan, dtype=dtype), engine))
        for learner_short, learner_dtype in FORMATS.items():
            found = compare(masters, groups, getattr(torch, learner_dtype))
            prefix = f"{name}_{short}_{learner_short}"
            figures |= {f"{prefix}_{figure}": value for figure, value in found.items()}
    return figures


def compare(
    masters: Decoder, groups: Sequence[RolloutGroup], compute_dtype: torch.dtype
) -> dict[str, float]:
    """Return the figures of ``groups`` under the learner's pass in ``compute_dtype``."""
    import torch

    from headrace.learners.loss import token_logprobs
    from headrace.learners.metrics import LossSums
    from headrace.learners.packing import microbatches
    from headrace.learners.selection import unweighted
    from headrace.objectives import mismatch

    rows = unweighted(groups)
    longest = max(group.num_tokens for group in rows)
    sums, device = LossSums(), torch.device("cpu")
    is_mixed = compute_dtype != torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype=compute_dtype, enabled=is_mixed):
        for batch in microbatches(rows, max_tokens=2 * longest, device=device):
            logprobs, _ = token_logprobs(masters, batch, 1.0, compute_dtype)
            gaps = logprobs - batch.generator_logprobs
            outside = ((gaps.exp() - 1.0).abs() > _CLIP).sum()
            sums.count(**mismatch.mismatch_sums(gaps, batch.segments), outside=outside)
            sums.peak(gap=gaps.abs())
    found = mismatch.figures(sums.totals)
    return {
        "k1": found["k1"],
        "k3": found["k3"],
        "max_gap": sums.peaks["gap"],
        "ess": found["ess"],
        "clip_share": sums["outside"] / sums["tokens"],
    }


BENCHMARK = Benchmark(
    name="mismatch",
    summary="how far generator and learner disagree in fp32, bf16 and fp16",
    measure=measure,
)
