"""A realistic run directory, written by the real monitors from made-up records."""

import itertools
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from headrace.monitors import JsonlMonitor, RolloutMonitor, evaluation_metrics, rollout_metrics
from headrace.types import (
    EvaluationRecord,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    RunEvent,
    SamplingParams,
    StepRecord,
    Verdict,
    VersionSpan,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(1,))
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, stop_token_ids=(1,))
CONFIG = {
    "name": "quickstart",
    "seed": 0,
    "num_steps": 20,
    "model": {"path": "nano"},
    "sampling": {"temperature": 1.0, "max_tokens": 24},
}


def rollout(index: int = 0, text: str = "8+2:10$", *, length: int = 8, version: int = 0) -> Rollout:
    return Rollout(
        rollout_index=index,
        completion_ids=tuple(range(3, 3 + length)),
        loss_mask=(True,) * length,
        generator_logprobs=tuple(-0.1 * (k + 1) for k in range(length)),
        version_spans=(VersionSpan(policy_version=version, start=0, end=length),) if length else (),
        finish_reason="stop",
        text=text,
    )


def verdict(reward: float | None) -> Verdict:
    outcome = Outcome.INFRA if reward is None else Outcome.PASS if reward >= 1 else Outcome.WRONG
    detail = "judge timed out" if reward is None else "got 10, expected 10"
    components = {"exact": reward}
    return Verdict(
        outcome=outcome, reward=reward, verifier="exact", components=components, detail=detail
    )


def group(
    rewards: Sequence[float | None],
    *,
    prompt_id: str = "p1",
    source: str = "sums",
    prompt: str = "8+2=",
    text: str = "8+2:10$",
    sampling: SamplingParams = SAMPLED,
    version: int = 0,
) -> RolloutGroup:
    return RolloutGroup(
        group_id=f"0/{prompt_id}",
        prompt=Prompt(
            prompt_id=prompt_id, source=source, text=prompt, token_ids=(4, 5, 6), answer="10"
        ),
        rollouts=tuple(
            rollout(k, text, length=6 + k % 5, version=version) for k in range(len(rewards))
        ),
        sampling=sampling,
        verdicts=tuple(verdict(reward) for reward in rewards),
    )


def _skill(step: int, num_steps: int) -> float:
    return 0.37 + 0.6 * (1 - math.exp(-4 * step / max(1, num_steps)))


def _groups(
    draw: random.Random, skill: float, size: int, count: int, sampling: SamplingParams, text: str
) -> tuple[RolloutGroup, ...]:
    return tuple(
        group(
            [float(draw.random() < skill) for _ in range(size)],
            prompt_id=f"{k * 2654435761 % 2**32:08x}",
            source="carry" if k % 2 else "plain",
            prompt=f"{k % 9 + 1}+{k % 7 + 2}-1=",
            text=text,
            sampling=sampling,
        )
        for k in range(count)
    )


def _step_metrics(draw: random.Random, step: int, num_steps: int) -> dict[str, float]:
    skill = _skill(step, num_steps)
    generate, score, update = draw.uniform(0.18, 0.24), 0.01, draw.uniform(0.25, 0.31)
    return {
        "controller/time/generate_seconds": generate,
        "controller/time/score_seconds": score,
        "controller/time/update_seconds": update,
        "controller/time/publish_seconds": 0.004,
        "controller/time/publish_wait_seconds": 0.004,
        "controller/time/step_seconds": generate + score + update + 0.004,
        "generator/throughput/tokens_per_second": draw.uniform(17000, 19000),
        "learner/reward/trained_mean": skill * 0.9,
        "learner/entropy/mean": 0.35 * (1.2 - skill),
        "learner/kl/reference": 0.02 * step / num_steps,
        "learner/importance_ratio/mean": draw.gauss(1.0, 1e-4),
        "learner/importance_ratio/max": 1.0 + abs(draw.gauss(0, 2e-3)),
        "learner/importance_weight/mean": draw.gauss(1.0, 1e-2),
        "learner/importance_weight/max": 2.0,
        "learner/importance_weight/ess": 1.0 - abs(draw.gauss(0, 1e-2)),
        "learner/importance_weight/truncated_share": abs(draw.gauss(0, 1e-2)),
        "learner/clip/share": abs(draw.gauss(0, 1e-4)),
        "learner/mismatch/k1": draw.gauss(0, 1e-5),
        "learner/mismatch/k3": abs(draw.gauss(0, 1e-6)),
        "learner/gradient/norm": draw.uniform(0.3, 0.9) * (1.3 - skill),
        "learner/optimizer/learning_rate": 3e-4 * (1 - step / (num_steps + 1)),
        "learner/groups/num_no_spread": round(8 * skill),
        "learner/groups/num_trained": 8 - round(8 * skill),
        "learner/staleness/max": 0.0,
    }


def _record_step(
    monitors: Sequence[JsonlMonitor | RolloutMonitor],
    draw: random.Random,
    step: int,
    num_steps: int,
    text: str,
) -> None:
    groups = _groups(draw, _skill(step, num_steps), 4, 8, SAMPLED, text)
    metrics = {**rollout_metrics(groups), **_step_metrics(draw, step, num_steps)}
    for monitor in monitors:
        monitor.on_step(
            StepRecord(
                step=step, num_steps=num_steps, policy_version=step, metrics=metrics, groups=groups
            )
        )


def _record_evaluation(
    monitors: Sequence[JsonlMonitor | RolloutMonitor],
    draw: random.Random,
    step: int,
    num_steps: int,
    text: str,
) -> None:
    skill = _skill(step, num_steps)
    greedy = _groups(draw, skill + 0.02, 1, 16, GREEDY, text)
    sampled = _groups(draw, skill, 4, 16, SAMPLED, text)
    metrics = {
        **evaluation_metrics(greedy, "greedy", (1,)),
        **evaluation_metrics(sampled, "sampled", (1, 4)),
        "controller/time/eval_seconds": 0.3,
    }
    for monitor in monitors:
        monitor.on_evaluation(
            EvaluationRecord(
                step=step, policy_version=step, metrics=metrics, groups=(*greedy, *sampled)
            )
        )


def make_run(
    directory: Path,
    *,
    num_steps: int = 20,
    evaluate_every: int | None = 10,
    text: str = "8+2:10-1:9$",
    rollouts_every: int = 10,
    config: Mapping[str, object] = CONFIG,
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**config, "num_steps": num_steps}))
    draw = random.Random(0)  # noqa: S311 - made-up numbers, not secrets
    ticks = itertools.count(1_790_000_000.0, 0.6)
    jsonl = JsonlMonitor(directory, clock=lambda: next(ticks))
    monitors = (jsonl, RolloutMonitor(directory, every=rollouts_every))
    versions = {"headrace": "0.1.0", "torch": "2.13.0"}
    jsonl.on_event(RunEvent(kind="start", step=0, message="started", fields={"versions": versions}))
    for step in range(num_steps + 1):
        if step:
            _record_step(monitors, draw, step, num_steps, text)
        if evaluate_every is not None and step % evaluate_every == 0:
            _record_evaluation(monitors, draw, step, num_steps, text)
    jsonl.on_event(RunEvent(kind="finish", step=num_steps, message=f"done, {text}"))
    for monitor in monitors:
        monitor.close()
    return directory


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", num_steps=20)


@pytest.fixture
def build_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda **options: make_run(tmp_path / "built", **options)


@pytest.fixture
def make_group() -> Callable[..., RolloutGroup]:
    return group


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    return rollout
