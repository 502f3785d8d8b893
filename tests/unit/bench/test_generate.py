from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.bench import generate, generate_run, generate_workload, vllm_peer
from headrace.bench.generate_records import Engine, GeneratePlan
from headrace.bench.nano_model import write_nano_model
from headrace.errors import ConfigError
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine import products, runner_choice
from headrace.models.checkpoint import load_decoder
from headrace.types import GenerationRequest, RolloutGroup


@pytest.fixture
def plan(tiny_model: Path) -> GeneratePlan:
    return GeneratePlan(
        engine="headrace",
        model=str(tiny_model),
        dtype="float32",
        num_threads=torch.get_num_threads(),
        num_groups=2,
        group_size=3,
        num_prompt_tokens=20,
        num_new_tokens=5,
        num_repetitions=2,
    )


@pytest.mark.parametrize("engine", ["headrace", "hf"])
def test_every_engine_samples_the_same_number_of_tokens(
    plan: GeneratePlan, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: Counter[int] = Counter()
    generate_really = TorchGenerator.generate

    async def counted(
        self: TorchGenerator, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[RolloutGroup]:
        async for group in generate_really(self, requests):
            sampled.update(len(rollout.completion_ids) for rollout in group.rollouts)
            yield group

    monkeypatch.setattr(TorchGenerator, "generate", counted)
    found = generate_run.run(replace(plan, engine=engine))
    assert found["num_tokens"] == 2 * 3 * 5
    assert len(found["seconds"]) == 2
    assert all(seconds > 0 for seconds in found["seconds"])
    if engine == "headrace":
        # One call that does not count, two that do.
        assert sampled == {5: 3 * 6}
        assert found["linear_seconds"] > 0
        assert found["memcpy_seconds"] > 0


def test_prompts_do_not_depend_on_the_engine_and_differ_from_each_other(plan: GeneratePlan) -> None:
    own, other = (
        generate_workload.prompts(replace(plan, engine=e), 100) for e in ("headrace", "hf")
    )
    assert own == other
    assert len({tuple(ids) for ids in own}) == 2
    assert all(len(ids) == 20 and max(ids) < 100 for ids in own)


def test_spread_lengths_have_about_the_mean_of_equal_ones() -> None:
    plan = GeneratePlan(engine="headrace", model="", num_groups=4000, num_new_tokens=64)
    assert set(generate_workload.lengths(plan)) == {64}
    spread = generate_workload.lengths(replace(plan, length_sigma=1.0))
    assert sum(spread) / len(spread) == pytest.approx(64, rel=0.1)
    assert max(spread) > 5 * sorted(spread)[2000]


def test_figures_are_ratios_of_the_runs_they_name(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    def fake(_module: str, arguments: list[str], **_options: object) -> float:
        plan = GeneratePlan(**json.loads(Path(arguments[0]).read_text("utf-8")))
        seconds = {"hf": 4.0, "vllm": 2.5, "headrace": 2.0}[plan.engine] / plan.num_threads
        seconds *= 1.25 if plan.length_sigma else 1.0
        seconds *= 1.1 if plan.group_size == 16 else 1.0
        seconds *= 0.5 if plan.dtype == "int8" else 1.0
        seconds *= plan.num_groups if plan.model.endswith("nano") else 1.0
        result = {
            "seconds": [seconds] * 3,
            "num_tokens": 100,
            "linear_seconds": 1.5,
            "update_seconds": 0.3,
            "memcpy_seconds": 0.1,
        }
        Path(arguments[1]).write_text(json.dumps(result), encoding="utf-8")
        return 0.0

    monkeypatch.setattr(generate, "run_module", fake)
    monkeypatch.setenv(vllm_peer.VARIABLE, sys.executable)
    monkeypatch.setattr(generate, "resolve_model", lambda _: tiny_model)
    monkeypatch.setattr(generate, "agreement", lambda _: {"agreement_hf_fp32_mean": 1e-6})
    figures = generate.measure(("vllm", "hf"), lambda _: None)
    expected = {
        "tokens_per_second_bf16_8x8": 50.0,
        "bound_share_fp32_8x8": 0.75,
        "weight_update_vs_memcpy_bf16": 3.0,
        "hf_tokens_per_second_fp32_8x8": 25.0,
        "ratio_vs_hf_bf16_8x8": 2.0,
        "ratio_vs_hf_bf16_1": 2.0,
        "vllm_tokens_per_second_bf16_8x8": 40.0,
        "vllm_tokens_per_second_fp32_8x8": 40.0,
        "ratio_vs_vllm_bf16_8x8": 1.25,
        "ratio_vs_vllm_fp32_8x8": 1.25,
        "ratio_vs_vllm_bf16_1": 1.25,
        "ratio_int8_vs_vllm_bf16_8x8": 2.5,
        "tokens_per_second_nano_b256": 50.0 / 256,
        "vllm_tokens_per_second_nano_b1": 40.0,
        "ratio_vs_vllm_nano_b1": 1.25,
        "ratio_vs_vllm_nano_b256": 1.25,
        "two_thread_scaling_bf16": 2.0,
        "group_prefill_ratio_g16": 1.1,
        "lognormal_throughput_share": 0.8,
        "agreement_hf_fp32_mean": 1e-6,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    alone = generate.measure((), lambda _: None)
    assert not [name for name in alone if "vs_hf" in name or "vllm" in name]


@pytest.mark.parametrize("engine", ["headrace", "hf"])
def test_the_nano_model_is_a_checkpoint_of_three_million_parameters_that_engines_load(
    plan: GeneratePlan, engine: Engine, tmp_path: Path
) -> None:
    model = write_nano_model(tmp_path / "nano")
    assert sum(p.numel() for p in load_decoder(model).parameters()) == pytest.approx(
        3.1e6, rel=0.05
    )
    found = generate_run.run(replace(plan, engine=engine, model=str(model), num_repetitions=1))
    assert found["num_tokens"] == 2 * 3 * 5


def test_matrices_of_eight_bits_are_a_dtype_of_their_own(
    plan: GeneratePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, runner_choice):  # here nobody asks whether they are exact
        monkeypatch.setattr(module, "can_multiply_int8", lambda _: True)
    found = generate_run.run(replace(plan, dtype="int8", num_repetitions=1))
    assert found["num_tokens"] == 2 * 3 * 5
    assert found["linear_seconds"] > 0


def test_the_python_of_vllm_may_be_named_and_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(vllm_peer.VARIABLE, sys.executable)
    assert vllm_peer.vllm_python() == sys.executable
    monkeypatch.setenv(vllm_peer.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=f"{vllm_peer.VARIABLE}=.*no such file"):
        generate.measure(("vllm",), lambda _: None)


def test_whoever_starts_a_program_of_the_benchmarks_has_not_imported_it() -> None:
    # Python warns of a module that is run after it was imported, since then there are two of it.
    code = "import sys, headrace.bench; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"headrace.bench.generate_run", "headrace.bench.step_trl"} & {*done.stdout.split()}
