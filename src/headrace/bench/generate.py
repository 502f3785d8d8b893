"""`bench generate [--against hf,vllm]`: how fast rollouts are sampled, and what bounds it.

Measured: tokens a second of SmolLM2-135M, 8 prompts of 64 tokens with 8 rollouts of 64 new tokens
each (`8x8`), prefill included, in bf16, fp32 and with matrices in eight bits, and in bf16 of one
sequence alone (`1`); on one thread, bf16 `8x8` on two as well; each in a process of its own, the
median of three repetitions after one that does not count. Beside it, in the same run: the peers;
the bare matrix products of the same work (`bound_share`); a memcpy of the weights; a group of 16
on a prompt of 512 tokens against a single rollout on it; lengths drawn log-normal with sigma 1
against equal ones, 64 rollouts at a time; and a model of 3 million parameters in fp32, one sequence
(`nano_b1`) and 256 (`nano_b256`). Last, how far the log-probs are from those of transformers and of
the learner (`agreement`). Not measured: loading, scoring.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench import vllm_peer
from headrace.bench.command import run_module
from headrace.bench.generate_agreement import agreement
from headrace.bench.generate_records import SHORT_NAMES, Engine, GeneratePlan
from headrace.bench.nano_model import write_nano_model
from headrace.bench.result import Benchmark, Figures, Peers, Progress
from headrace.models.catalogue import resolve_model

MODEL = "smollm2-135m"

_ENGINES: tuple[Engine, ...] = ("hf", "vllm")
_PEER_DTYPES = ("bfloat16", "float32")
_NANO_BATCHES = (1, 256)


def measure(peers: Peers, progress: Progress) -> Figures:
    """Measure headrace, and those of transformers (hf) and vLLM that are asked for.

    Raises ModelError when the model was not fetched, ConfigError when vLLM is not installed.
    """
    if "vllm" in peers:
        vllm_peer.vllm_python()
    model = str(resolve_model(MODEL))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        runs = _Runs(Path(name), progress)
        figures: dict[str, float] = {}
        plan = GeneratePlan(engine="headrace", model=model)
        for dtype in SHORT_NAMES:
            figures |= _speed(runs, replace(plan, dtype=dtype))
        nano = replace(plan, model=str(write_nano_model(Path(name) / "nano")), dtype="float32")
        figures |= {
            f"tokens_per_second_nano_b{batch}": runs.tokens_per_second(_batch(nano, batch))
            for batch in _NANO_BATCHES
        }
        figures["tokens_per_second_bf16_1"] = runs.tokens_per_second(_alone(plan))
        for peer in _ENGINES:
            if peer in peers:
                figures |= _against(runs, plan, nano, figures, peer)
        if "vllm" in peers:
            figures["ratio_int8_vs_vllm_bf16_8x8"] = (
                figures["tokens_per_second_int8_8x8"] / figures["vllm_tokens_per_second_bf16_8x8"]
            )
        two = runs.tokens_per_second(replace(plan, num_threads=2))
        figures["two_thread_scaling_bf16"] = two / figures["tokens_per_second_bf16_8x8"]
        figures |= _shared_prefill(runs, plan)
        figures |= _spread_lengths(runs, plan)
        progress("log-probs beside those of transformers and of the learner")
        figures |= agreement(Path(model))
    return figures


class _Runs:
    """Runs plans one after another."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._count = 0

    def result(self, plan: GeneratePlan) -> dict[str, Any]:
        self._count += 1
        shape = f"{plan.num_groups}x{plan.group_size} of {plan.num_prompt_tokens}"
        self._progress(
            f"{plan.engine}: {plan.dtype}, {shape} + {plan.num_new_tokens} tokens, "
            f"{plan.num_threads} threads"
        )
        paths = [self._folder / f"{kind}-{self._count}.json" for kind in ("plan", "result")]
        plan.write(paths[0])
        environment = {"OMP_NUM_THREADS": str(plan.num_threads), "HF_HUB_OFFLINE": "1"}
        if plan.engine == "vllm":
            environment = vllm_peer.environment(plan.num_threads)
        run_module(
            "headrace.bench.generate_run",
            [str(path) for path in paths],
            progress=self._progress,
            environment=environment,
            python=vllm_peer.vllm_python() if plan.engine == "vllm" else sys.executable,
        )
        found: dict[str, Any] = json.loads(paths[1].read_text(encoding="utf-8"))
        return found

    def tokens_per_second(self, plan: GeneratePlan) -> float:
        found = self.result(plan)
        seconds: list[float] = found["seconds"]
        return float(found["num_tokens"]) / median(seconds)


def _speed(runs: _Runs, plan: GeneratePlan) -> dict[str, float]:
    found = runs.result(plan)
    seconds, kind = median(found["seconds"]), f"{SHORT_NAMES[plan.dtype]}_8x8"
    return {
        f"tokens_per_second_{kind}": found["num_tokens"] / seconds,
        f"bound_share_{kind}": found["linear_seconds"] / seconds,
        f"weight_update_vs_memcpy_{SHORT_NAMES[plan.dtype]}": (
            found["update_seconds"] / found["memcpy_seconds"]
        ),
    }


def _against(
    runs: _Runs, plan: GeneratePlan, nano: GeneratePlan, own: dict[str, float], peer: Engine
) -> dict[str, float]:
    """Measure ``peer`` on what headrace was measured on, and compare."""
    theirs = replace(plan, engine=peer)
    speeds = {
        f"{SHORT_NAMES[dtype]}_8x8": runs.tokens_per_second(replace(theirs, dtype=dtype))
        for dtype in _PEER_DTYPES
    }
    for batch in _NANO_BATCHES:
        speeds[f"nano_b{batch}"] = runs.tokens_per_second(replace(_batch(nano, batch), engine=peer))
    speeds["bf16_1"] = runs.tokens_per_second(_alone(theirs))
    ratios = {
        f"ratio_vs_{peer}_{kind}": own[f"tokens_per_second_{kind}"] / speed
        for kind, speed in speeds.items()
    }
    return {f"{peer}_tokens_per_second_{kind}": speed for kind, speed in speeds.items()} | ratios


def _alone(plan: GeneratePlan) -> GeneratePlan:
    """Return ``plan`` with one sequence."""
    return _batch(plan, 1)


def _batch(plan: GeneratePlan, num_sequences: int) -> GeneratePlan:
    """Return ``plan`` with sequences of nothing in common."""
    return replace(plan, num_groups=num_sequences, group_size=1)


def _shared_prefill(runs: _Runs, plan: GeneratePlan) -> dict[str, float]:
    """Compare the first token of sixteen rollouts on one long prompt with that of a single one."""
    long = replace(plan, num_groups=1, num_prompt_tokens=512, num_new_tokens=1)
    group, single = (runs.result(replace(long, group_size=size)) for size in (16, 1))
    return {"group_prefill_ratio_g16": median(group["seconds"]) / median(single["seconds"])}


def _spread_lengths(runs: _Runs, plan: GeneratePlan) -> dict[str, float]:
    many = replace(
        plan, num_groups=256, group_size=1, max_concurrent_rollouts=64, num_repetitions=1
    )
    equal = runs.tokens_per_second(many)
    spread = runs.tokens_per_second(replace(many, length_sigma=1.0))
    return {"lognormal_throughput_share": spread / equal}


BENCHMARK = Benchmark(
    name="generate",
    summary="how fast SmolLM2-135M is sampled from, alone or beside transformers and vLLM",
    measure=measure,
    peers=_ENGINES,
)
