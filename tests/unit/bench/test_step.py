from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
from headrace.bench.step_reward import reward
from headrace.bench.trl_records import TrlPlan, TrlTimes
from headrace.config import RunConfig, load_config
from headrace.errors import ConfigError
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
    questions = step_workload.questions(4)
    assert len(set(questions)) == 4 * step_workload.GROUPS_PER_STEP
    assert step_workload.questions(9)[: len(questions)] == questions


def test_the_recipe_is_the_workload(tmp_path: Path) -> None:
    model = tmp_path / 'a "quoted" name'
    config = load_config(step_workload.write_recipe(tmp_path, model, 4))
    assert config.model.path == str(model)
    assert (config.groups_per_step, config.group_size, config.sampling.max_tokens) == (8, 8, 24)
    assert config.sampling.temperature == 1.0
    assert not config.data.shuffle
    assert {config.generator.dtype, config.learner.compute_dtype} == {"float32"}


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


def test_without_a_peer_there_is_no_figure_of_one() -> None:
    assert step.trl_figures([measured(16.0)], {}) == {}


def test_missing_trl_is_an_error_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trl" else find(name)
    )
    with pytest.raises(ConfigError, match=r"trl not installed; run `pip install .*'\.\[trl\]'`"):
        step.require_trl()


def test_plan_and_times_survive_their_files(tmp_path: Path) -> None:
    plan = TrlPlan(model="m", num_steps=2, batch_size=16)
    plan.write(tmp_path / "plan.json")
    assert TrlPlan(**json.loads((tmp_path / "plan.json").read_text())) == plan
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
    config = load_config(step_workload.write_recipe(tmp_path, tiny_model, 1))
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
    recipe = step_workload.write_recipe(tmp_path, tiny_model, 2)
    steps = step._run_headrace(recipe, tmp_path / "run", lambda _: None)
    figures = step.headrace_figures(steps)
    assert figures["num_groups_kept_share"] == 1.0
    assert step._gradient_error(tiny_model, recipe, tmp_path / "run", lambda _: None) < 1e-4


@pytest.mark.slow
def test_trl_does_the_same_workload(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="the peer is an extra")
    found = step._run_trl(tiny_model, 64, tmp_path, lambda _: None)
    assert len(found.step_seconds) == len(found.completion_tokens) == step._NUM_STEPS
    assert set(found.no_spread_share) == {0.0}
    assert all(0 < length <= step_workload.MAX_TOKENS for length in found.completion_tokens)
