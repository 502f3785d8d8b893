from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from headrace.bench import step, step_trl, step_workload
from headrace.bench.gradient import (
    gradient_relative_error,
    learner_gradient,
    plain_gradient,
    relative_error,
)
from headrace.bench.step_bound import step_operations
from headrace.bench.step_reward import reward
from headrace.bench.step_workload import Workload
from headrace.bench.trl_records import TrlPlan, TrlTimes
from headrace.config import RunConfig, load_config
from headrace.errors import ConfigError
from headrace.models.checkpoint import load_decoder
from headrace.monitors.run_directory import MetricsLine
from headrace.types import (
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
)


def paid(completion: str) -> float:
    return reward("", completion, None, {})


@given(st.lists(st.text(), min_size=2, max_size=8, unique=True))
def test_different_completions_are_paid_differently(completions: list[str]) -> None:
    rewards = {paid(completion) for completion in completions}
    assert len(rewards) == len(completions)
    assert max(rewards) - min(rewards) > 1e-9
    assert all(0.0 <= one < 1.0 for one in rewards)


def test_a_lone_surrogate_is_paid_too() -> None:
    assert 0.0 <= paid("\ud800") < 1.0


def test_importing_the_reward_imports_no_torch() -> None:
    code = "import sys, headrace.bench.step_reward; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_trl_is_paid_by_the_same_function() -> None:
    prompts = [[{"role": "user", "content": "1 + 1 ="}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("2", "3")]
    found = step_trl._rewards(prompts=prompts, completions=completions, trainer_state=None)
    assert found == [paid("2"), paid("3")]


def test_every_step_has_prompts_of_its_own_and_more_steps_begin_the_same() -> None:
    for plan in (workload(Path("m"), 4), workload(Path("m"), 4, is_chat=False)):
        questions = plan.questions
        assert len(dict(questions)) == 4 * step_workload.GROUPS_PER_STEP
        assert dataclasses.replace(plan, num_steps=9).questions[: len(questions)] == questions


def test_answers_are_those_of_the_questions() -> None:
    for is_chat in (True, False):
        for question, answer in workload(Path("m"), 4, is_chat=is_chat).questions:
            terms = question.rpartition(":")[2].strip(" =")
            assert eval(terms) == int(answer)  # noqa: S307 - sums made by the benchmark


def test_the_recipe_is_the_workload(tmp_path: Path) -> None:
    model = tmp_path / 'a "quoted" name'
    config = load_config(step_workload.write_recipe(tmp_path, workload(model, 4)))
    assert config.model.path == str(model)
    assert (config.groups_per_step, config.group_size, config.sampling.max_tokens) == (8, 8, 24)
    assert config.sampling.temperature == 1.0
    assert not config.data.shuffle
    assert {config.generator.dtype, config.learner.compute_dtype} == {"float32"}


def test_the_recipe_of_a_variant_differs_in_what_the_variant_says(tmp_path: Path) -> None:
    plan = workload(tmp_path / "m", 2, dtype="bfloat16", pays_answers=True, is_chat=False)
    config = load_config(step_workload.write_recipe(tmp_path, plan))
    assert {config.generator.dtype, config.learner.compute_dtype} == {"bfloat16"}
    assert config.verifier.components["reward"].kind == "numeric"
    assert config.data.template == "raw"
    assert config.learner.max_no_signal_steps == 3


def workload(model: Path, num_steps: int, **kw: Any) -> Workload:  # noqa: ANN401 - fields of it
    return Workload(model=model, num_steps=num_steps, **kw)


def measured(seconds: float, *, trained: float = 8.0) -> MetricsLine:
    metrics = {
        "controller/time/step_seconds": seconds,
        "controller/time/generate_seconds": seconds / 4,
        "controller/time/update_seconds": seconds / 2,
        "learner/groups/num_trained": trained,
        "generator/completion_tokens/mean": 20.0,
    }
    return MetricsLine(step=1, time=0.0, policy_version=1, metrics=metrics, sampling={})


def times(*seconds: float) -> TrlTimes:
    count = len(seconds)
    return TrlTimes(
        step_seconds=seconds, completion_tokens=(21.0,) * count, no_spread_share=(0.0,) * count
    )


def test_step_figures_are_medians() -> None:
    figures = step.headrace_figures([measured(16.0), measured(90.0), measured(8.0)])
    assert figures["step_seconds"] == 16.0
    assert figures["generate_seconds"] == 4.0
    assert figures["update_seconds"] == 8.0
    assert figures["rollouts_per_second"] == 4.0
    assert figures["num_groups_kept_share"] == 1.0


def test_a_group_left_out_shows_in_the_share_of_kept_groups() -> None:
    figures = step.headrace_figures([measured(1.0), measured(1.0, trained=6.0)])
    assert figures["num_groups_kept_share"] == 14 / 16


def test_trl_counts_with_its_faster_batch_size_and_without_its_warm_up() -> None:
    runs = {64: times(500.0, 50.0, 52.0, 51.0), 16: times(500.0, 48.0, 47.0, 49.0)}
    figures = step.trl_figures([measured(16.0)], runs)
    assert figures["trl_step_seconds"] == 48.0
    assert figures["trl_batch_size"] == 16
    assert figures["speedup_vs_trl_fp32"] == 3.0
    assert figures["trl_num_groups_kept_share"] == 1.0


def test_every_variant_is_compared_with_the_same_run_of_the_peer() -> None:
    runs = {"bf16": [measured(8.0)], "fp32_skip": [measured(4.0, trained=2.0)]}
    figures = step.speedups(runs, [measured(0.02)], {16: times(9.0, 48.0)}, {64: times(1.0, 0.06)})
    assert figures["speedup_vs_trl_bf16"] == 6.0
    assert figures["speedup_vs_trl_fp32_skip"] == 12.0
    assert figures["speedup_vs_trl_nano"] == pytest.approx(3.0)
    assert figures["trl_nano_rollouts_per_second"] == pytest.approx(64 / 0.06)
    assert step.variant_figures(runs)["num_groups_kept_share_fp32_skip"] == 0.25


def test_operations_are_those_of_the_modules_that_must_run(batch: Batch) -> None:
    directory, _, groups = batch
    decoder = load_decoder(directory)
    fed = sum(len(group.prompt.token_ids) for group in groups)
    sampled = 0
    for group in groups:
        for one in group.rollouts:
            sampled += len(one.completion_ids)
            fed += len(one.completion_ids) - 1
    body = sum(linear.weight.numel() for parts in decoder.linears() for linear in parts)
    expected = 4 * 2 * (body * fed + decoder.output_weight.numel() * sampled)
    assert step_operations(decoder.config, groups) == expected


def test_missing_trl_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trl" else find(name)
    )
    with pytest.raises(ConfigError, match=r"trl not installed; run `pip install .*'\.\[trl\]'`"):
        step.require_trl()


def test_plan_and_times_survive_their_files(tmp_path: Path) -> None:
    plan = TrlPlan(
        model="m", num_steps=2, batch_size=16, max_tokens=3, questions=("a", "b"), is_chat=True
    )
    plan.write(tmp_path / "plan.json")
    assert TrlPlan.read(tmp_path / "plan.json") == plan
    (tmp_path / "times.json").write_text(json.dumps(dataclasses.asdict(times(1.0, 2.0))))
    assert TrlTimes.read(tmp_path / "times.json") == times(1.0, 2.0)


Batch = tuple[Path, RunConfig, tuple[RolloutGroup, ...]]


def rollout(index: int, source: random.Random) -> Rollout:
    """Random tokens with log-probs near those of a model that knows nothing."""
    length = source.randint(1, 6)
    return Rollout(
        rollout_index=index,
        completion_ids=tuple(source.randrange(259) for _ in range(length)),
        loss_mask=(True,) * length,
        generator_logprobs=tuple(source.uniform(-9.0, -3.0) for _ in range(length)),
        version_spans=(VersionSpan(policy_version=0, start=0, end=length),),
        finish_reason="stop",
        text="",
    )


def scored_group(number: int, rewards: Sequence[float]) -> RolloutGroup:
    source = random.Random(number)  # noqa: S311 - test data
    ids = tuple(source.randrange(259) for _ in range(5 + number))
    verdicts = [Verdict(outcome=Outcome.PASS, reward=r, verifier="x") for r in rewards]
    return RolloutGroup(
        group_id=str(number),
        prompt=Prompt(prompt_id=str(number), source="train", text="", token_ids=ids),
        rollouts=tuple(rollout(index, source) for index in range(len(rewards))),
        sampling=SamplingParams(),
        verdicts=tuple(verdicts),
    )


@pytest.fixture
def batch(tiny_model: Path, tmp_path: Path) -> Batch:
    config = load_config(step_workload.write_recipe(tmp_path, workload(tiny_model, 1)))
    groups = (scored_group(0, (0.1, 0.9, 0.4)), scored_group(1, (0.7, 0.2, 0.3)))
    return tiny_model, config, groups


def test_the_gradient_of_the_learner_is_the_plain_one(batch: Batch) -> None:
    assert gradient_relative_error(*batch) < 1e-5


def test_a_group_without_spread_adds_tokens_and_no_gradient(batch: Batch) -> None:
    directory, config, groups = batch
    level = (*groups, scored_group(2, (0.5, 0.5, 0.5)))
    assert gradient_relative_error(directory, config, level) < 1e-5
    without = learner_gradient(directory, config, groups)
    assert relative_error(learner_gradient(directory, config, level), without) > 1e-2


def test_a_wrong_reward_or_temperature_shows_in_the_error(batch: Batch) -> None:
    directory, config, groups = batch
    ours = learner_gradient(directory, config, groups)
    other = (groups[0], scored_group(1, (0.7, 0.2, 0.31)))
    for wrong, temperature in ((other, 1.0), (groups, 1.001)):
        plain = plain_gradient(
            directory, wrong, clip_low=0.2, clip_high=0.2, temperature=temperature
        )
        assert relative_error(ours, plain) > 1e-4


def test_the_padding_token_has_a_gradient_too(batch: Batch) -> None:
    directory, config, groups = batch
    padding = AutoTokenizer.from_pretrained(directory).pad_token_id
    prompt = dataclasses.replace(groups[0].prompt, token_ids=(1, padding, 2))
    padded = (dataclasses.replace(groups[0], prompt=prompt), groups[1])
    assert gradient_relative_error(directory, config, padded) < 1e-5


@pytest.mark.slow
def test_headrace_does_the_workload_and_keeps_every_group(tiny_model: Path, tmp_path: Path) -> None:
    steps = step._run_headrace(workload(tiny_model, 2), tmp_path, lambda _: None)
    figures = step.headrace_figures(steps)
    assert figures["num_groups_kept_share"] == 1.0
    assert step._gradient_error(tiny_model, tmp_path, lambda _: None) < 1e-4


@pytest.mark.slow
def test_trl_does_the_same_workload(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the peer is an extra")
    plan = workload(tiny_model, 3)
    found = step._run_trl(plan, (64,), tmp_path, lambda _: None)[64]
    assert len(found.step_seconds) == len(found.completion_tokens) == 3
    assert set(found.no_spread_share) == {0.0}
    assert all(0 < length <= step_workload.MAX_TOKENS for length in found.completion_tokens)
