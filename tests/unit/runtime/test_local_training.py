"""One real training that runs ahead of its learner: it ends, and nothing is lost or too stale."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeMonitor
from lab import IDS

from headrace.kept_support import decode
from headrace.monitors import read_rollouts
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun
from headrace.types import RolloutGroup, StepRecord

BOUND = 3
EOS = 1
SETTINGS = (
    "num_steps=null",
    "num_epochs=1",
    "groups_per_step=2",
    "group_size=4",
    f"max_staleness={BOUND}",
    "learner.num_minibatches=2",
    "learner.optimizer.schedule=linear",
    # The KL term moves the weights whatever the rewards are: every planned update is made.
    "objective.kl_coefficient=0.01",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "monitors.rollouts_every=3",
    "eval.every=3",
)


def versions(group: RolloutGroup) -> list[int]:
    return [span.policy_version for r in group.rollouts for span in r.version_spans]


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_a_training_that_runs_ahead_ends_trains_every_prompt_once_and_stays_within_its_bound(
    prepare: Callable[..., PreparedRun], tmp_path: Path, on_update: str
) -> None:
    records: list[StepRecord] = []
    prepared = prepare(*SETTINGS, f"generator.on_update={on_update}")
    monitor = FakeMonitor(on_each_step=records.append)
    run = LocalRun(prepared=prepared, output=tmp_path / "run", extra_monitors=(monitor,))

    outcome = asyncio.run(run.train())

    assert (outcome.num_steps_done, outcome.policy_version, outcome.stopped_early) == (7, 14, False)
    prompts = Counter(group.prompt.prompt_id for record in records for group in record.groups)
    assert prompts == Counter(prompt.prompt_id for prompt in prepared.train.prompts)
    staleness = [record.metrics["learner/staleness/max"] for record in records]
    assert max(staleness) <= BOUND
    assert max(staleness) > 0 or on_update != "wait", "or nothing ran ahead"
    for record in records:
        # The last minibatch of the step meets the weights of all its updates but one.
        newest = record.policy_version - 1
        assert newest - min(v for g in record.groups for v in versions(g)) <= BOUND


def test_a_training_that_runs_ahead_weighs_what_older_weights_sampled(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    records: list[StepRecord] = []
    monitor = FakeMonitor(on_each_step=records.append)
    prepared = prepare(*SETTINGS, "objective.proximal=recompute", "objective.correction=tis")

    asyncio.run(
        LocalRun(prepared=prepared, output=tmp_path / "run", extra_monitors=(monitor,)).train()
    )

    found = [record.metrics for record in records]
    off = [abs(metrics["learner/importance_weight/mean"] - 1.0) for metrics in found]
    assert off[0] < 1e-4, "the first batch was sampled with the learner's own weights"
    assert max(off) > 1e-3, "and later ones were not"
    assert all(metrics["learner/importance_weight/max"] <= 2.0 for metrics in found)


def test_a_run_keeps_the_checkpoints_rollouts_and_evaluations_that_its_recipe_asks_for(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    monitor = FakeMonitor()
    output = tmp_path / "run"
    prepared = prepare(*SETTINGS, "monitors.record=none")

    asyncio.run(LocalRun(prepared=prepared, output=output, extra_monitors=(monitor,)).train())

    kept = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000006", "step-000007"], "of those at 2, 4, 6 and the end"
    assert [record.step for record in monitor.evaluations] == [0, 3, 6, 7]
    rollouts = {path.name for path in (output / "rollouts").glob("step-*")}
    assert rollouts == {f"step-{step:06d}.parquet" for step in (1, 3, 6, 7)}


def test_what_a_recipe_records_of_its_sampling_is_in_the_rollout_files(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    settings = (
        "num_steps=1",
        "objective.proximal=recompute",
        "sampling.top_p=0.9",
        "sampling.min_tokens=5",
        "sampling.banned_token_ids=[0]",
        "sampling.forced_prefix='1+'",
        "sampling.raw_logprobs=true",
        "sampling.kept_support=true",
        "monitors.rollouts_every=1",
    )
    output = tmp_path / "run"

    asyncio.run(LocalRun(prepared=prepare(*settings), output=output).train())

    groups = read_rollouts(output / "rollouts" / "step-000001.parquet")
    prefix = (IDS["1"], IDS["+"])
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        assert rollout.completion_ids[:2] == prefix
        assert rollout.text.startswith("1+")
        assert rollout.loss_mask[:3] == (False, False, True)
        assert EOS not in rollout.completion_ids[:5]
        assert rollout.raw_logprobs is not None
        assert rollout.kept_support is not None
        for token, packed in list(zip(rollout.completion_ids, rollout.kept_support, strict=True))[
            2:
        ]:
            kept = decode(packed).tolist()
            assert token in kept
            assert 0 not in kept
        raw, sampled = rollout.raw_logprobs[2:], rollout.generator_logprobs[2:]
        # A filter and a mask only add to the probability of what they leave.
        assert all(one <= other + 1e-5 for one, other in zip(raw, sampled, strict=True))


def test_on_policy_the_learner_agrees_with_an_engine_that_samples_what_filters_left(
    prepare: Callable[..., PreparedRun], tmp_path: Path
) -> None:
    records: list[StepRecord] = []
    monitor = FakeMonitor(on_each_step=records.append)
    prepared = prepare(
        "num_steps=2",
        "sampling.temperature=0.8",
        "sampling.top_p=0.7",
        "sampling.top_k=9",
        "sampling.banned_token_ids=[0]",
        "sampling.kept_support=true",
        "objective.kl_coefficient=0.01",
        "learner.optimizer.learning_rate=0.01",
    )

    asyncio.run(
        LocalRun(prepared=prepared, output=tmp_path / "run", extra_monitors=(monitor,)).train()
    )

    for record in records:
        assert record.metrics["learner/mismatch/max_gap"] < 1e-4
        assert record.metrics["learner/importance_ratio/max"] == pytest.approx(1.0, abs=1e-4)
    kept = [
        len(decode(packed))
        for record in records
        for group in record.groups
        for rollout in group.rollouts
        for packed in rollout.kept_support or ()
    ]
    assert max(kept) <= 9, "or nothing was filtered"
    assert sum(kept) > len(kept), "or there was nothing to choose from"
