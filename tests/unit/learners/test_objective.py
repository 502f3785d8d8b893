"""What a step computes and leaves out, replays and adds to rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from objective_lab import (
    CORRECTION,
    LOSS,
    RECOMPUTE,
    STALE_TIS,
    VERSION,
    MakeGroup,
    MakeLearner,
    Settings,
    difference,
    outcome,
    prepared,
    rejection,
    stale,
    weight,
)

from headrace.kept_support import encode
from headrace.learners import TorchLearner
from headrace.learners import minibatch as minibatch_module
from headrace.learners.loss import Readings
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch
from headrace.types import RolloutGroup

# --- splits, and what is left out -------------------------------------------------------------

REJECTING: list[Settings] = [
    {**RECOMPUTE, CORRECTION: {**weight("token", "mask", 0.5, 1.5), "count_rejected": False}},
    {**RECOMPUTE, CORRECTION: {**rejection(), "count_rejected": False}},
    {**RECOMPUTE, CORRECTION: rejection()},
    {**RECOMPUTE, CORRECTION: {"m2po": 0.2, "count_rejected": False}},
    {CORRECTION: {"off_policy_mask": 0.1, "count_rejected": False}},
    {**RECOMPUTE, LOSS: "gspo", CORRECTION: weight("sequence", "mask", 0.1, 2.0)},
    {LOSS: "gmpo", "objective__entropy_coefficient": 0.1},
]


@pytest.mark.parametrize("settings", REJECTING, ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_every_split_gives_the_gradient_and_the_figures_of_the_whole(
    settings: Settings, aggregation: str, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    found = [
        outcome(
            prepared(
                make_learner,
                **settings,
                objective__aggregation=aggregation,
                learner__max_tokens_per_microbatch=budget,
            ),
            stale(batch),
        )
        for budget in (10_000, 1, 25)
    ]
    if found[0][1].get("learner/rejection/token_share") is not None:
        assert 0.0 < found[0][1]["learner/rejection/token_share"] < 1.0
    for gradient, metrics in found[1:]:
        assert difference(gradient, found[0][0]) < 1e-5
        assert metrics == pytest.approx(found[0][1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("count_rejected", [True, False])
def test_rollouts_rejected_before_the_pass_are_not_computed_and_change_nothing(
    *,
    aggregation: str,
    count_rejected: bool,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: Settings = {
        **RECOMPUTE,
        CORRECTION: {**rejection(), **weight(), "count_rejected": count_rejected},
        "objective__aggregation": aggregation,
        "learner__num_minibatches": 2,
        "max_staleness": 4,
    }
    computed: list[int] = []
    left_out = prepared(make_learner, **settings)
    watch(left_out, computed)
    gradient, metrics = outcome(left_out, stale(batch))
    num_left_out = sum(computed)

    computed.clear()
    # None is gone before the pass, and all of them are rejected in it.
    monkeypatch.setattr(
        minibatch_module, "_pack_again", lambda *_: pytest.fail("nothing may be gone")
    )
    monkeypatch.setattr("headrace.learners.updater.drop_rejected", lambda *_, **__: LossSums())
    all_of_them = prepared(make_learner, **settings)
    watch(all_of_them, computed)
    expected, expected_metrics = outcome(all_of_them, stale(batch))

    assert difference(gradient, expected) < 1e-5
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert num_left_out < sum(computed)


def watch(learner: TorchLearner, computed: list[int]) -> None:
    """Note how many tokens each forward pass of ``learner`` predicts."""
    inner = learner._read

    def read(decoder: Any, part: Microbatch) -> Readings:  # noqa: ANN401
        computed.append(len(part.target_ids))
        return inner(decoder, part)

    learner._read = read  # type: ignore[method-assign] - to see the passes


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_m2po_rejects_the_largest_moments_of_the_whole_minibatch(
    budget: int, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings: Settings = {**RECOMPUTE, "learner__max_tokens_per_microbatch": budget}
    learner = prepared(make_learner, **settings, objective__correction={"m2po": 0.2})
    squares: list[float] = []
    for part in learner._plan(learner._score(batch, LossSums())).batches:
        with torch.no_grad():
            logprobs = learner._logprobs(learner._decoder, part)
        squares += (logprobs - part.generator_logprobs).square().tolist()
    left = sorted(squares)
    while sum(left) / len(left) > 0.2:
        left.pop()
    _, metrics = outcome(learner, batch)
    assert 0 < len(left) < len(squares)
    assert metrics["learner/tokens/num_trained"] == len(left)
    share = 1 - len(left) / len(squares)
    assert metrics["learner/rejection/token_share"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 1),
        (RECOMPUTE, 1),
        ({**RECOMPUTE, CORRECTION: "tis"}, 1),
        ({"objective__proximal": "loglinear", **STALE_TIS}, 1),
        ({**RECOMPUTE, CORRECTION: {"m2po": 9.0}}, 2),
        ({"objective__kl_coefficient": 0.1}, 2),
        ({"objective__entropy_coefficient": 0.1}, 1),
    ],
)
def test_no_pass_is_made_that_the_objective_does_not_read(
    settings: Settings, passes: int, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    computed: list[int] = []
    learner = prepared(make_learner, **settings)
    watch(learner, computed)
    outcome(learner, stale(batch))
    assert len(computed) == passes
    assert len({*computed}) == 1


@pytest.mark.parametrize(
    ("settings", "num_trained"),
    [
        ({}, 3),
        ({"objective__kl_coefficient": 0.1}, 5),
        ({"objective__entropy_coefficient": 0.1}, 5),
        ({LOSS: "prime"}, 5),
        ({LOSS: "dppo_tv"}, 3),
    ],
)
def test_groups_without_a_spread_are_computed_only_where_something_else_pulls_on_them(
    settings: Settings, num_trained: int, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    _, metrics = outcome(prepared(make_learner, **settings), batch)
    assert metrics["learner/groups/num_trained"] == num_trained
    assert metrics["learner/groups/num_no_spread"] == 2


def test_where_everything_is_rejected_nothing_moves_and_the_figures_say_so(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    for minibatches in (1, 2):
        learner = prepared(
            make_learner,
            **RECOMPUTE,
            objective__correction=rejection(low=0.999999, high=1.000001),
            learner__num_minibatches=minibatches,
            max_staleness=4,
        )
        before = {name: t.clone() for name, t in learner._decoder.state_dict().items()}
        result = asyncio.run(learner.step(stale(batch)))
        assert result.num_updates == 0
        assert result.policy_version == VERSION
        assert result.metrics["learner/rejection/token_share"] == 1.0
        assert result.metrics["learner/rejection/rollout_share"] == 1.0
        assert result.metrics["learner/tokens/num_trained"] == 0
        assert all(math.isfinite(value) for value in result.metrics.values())
        after = learner._decoder.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


# --- the tokens that filters left -------------------------------------------------------------


def filtered(group: RolloutGroup, learner: TorchLearner, kept_share: float) -> RolloutGroup:
    """The group as an engine that samples from parts of the vocabulary would report it."""
    draw = torch.Generator().manual_seed(7)
    kept = [
        [
            sorted(
                {token, *(torch.rand(61, generator=draw) < kept_share).nonzero().flatten().tolist()}
            )
            for token in rollout.completion_ids
        ]
        for rollout in group.rollouts
    ]
    recorded = dataclasses.replace(
        group,
        rollouts=tuple(
            dataclasses.replace(rollout, kept_support=tuple(encode(ids) for ids in own))
            for rollout, own in zip(group.rollouts, kept, strict=True)
        ),
    )
    (part,) = learner._plan(learner._score([recorded], LossSums())).batches
    with torch.no_grad():
        logprobs = learner._logprobs(learner._decoder, part)
    said = {
        row.rollout.rollout_index: tuple(values.tolist())
        for row, values in zip(
            part.rows,
            torch.split(logprobs, [len(row.trained) for row in part.rows]),
            strict=True,
        )
    }
    return dataclasses.replace(
        recorded,
        rollouts=tuple(
            dataclasses.replace(rollout, generator_logprobs=said[rollout.rollout_index])
            for rollout in recorded.rollouts
        ),
    )


@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_kept_tokens_are_replayed_so_that_on_policy_every_ratio_is_one(
    budget: int, make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    group = make_group([3, 1, 4], [[1, 5, 9, 2], [6, 5], [3]], [1.0, 0.0, 0.5])
    learner = prepared(make_learner, learner__max_tokens_per_microbatch=budget)
    replayed = filtered(group, prepared(make_learner), 0.1)
    _, metrics = outcome(learner, [replayed])
    assert metrics["learner/importance_ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learner/mismatch/max_gap"] == pytest.approx(0.0, abs=1e-5)

    forgotten = dataclasses.replace(
        replayed,
        rollouts=tuple(dataclasses.replace(r, kept_support=None) for r in replayed.rollouts),
    )
    _, biased = outcome(learner, [forgotten])
    assert biased["learner/mismatch/max_gap"] > 0.3, "or there was nothing to replay"


def test_replayed_logprobs_are_transformers_own_over_the_kept_tokens(
    make_group: MakeGroup, make_learner: MakeLearner, model_directory: Callable[[str], Any]
) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy, and only used here

    group = make_group([3, 1, 4], [[1, 5], [2, 7]], [1.0, 0.0])
    learner = make_learner()
    replayed = filtered(group, learner, 0.2)
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32)
    from headrace.kept_support import decode  # noqa: PLC0415

    for rollout in replayed.rollouts:
        ids = torch.tensor([[3, 1, 4, *rollout.completion_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, 2:-1]
        assert rollout.kept_support is not None
        for t, packed in enumerate(rollout.kept_support):
            kept = decode(packed).tolist()
            left = torch.log_softmax(logits[t, kept], dim=0)
            place = kept.index(rollout.completion_ids[t])
            assert rollout.generator_logprobs[t] == pytest.approx(left[place].item(), abs=1e-5)


# --- the reward's extra terms -----------------------------------------------------------------


def test_the_kl_in_the_reward_is_the_sum_of_the_generators_gap_to_the_start(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    group = make_group([3, 1, 4], [[1, 5, 9, 2], [6, 5], [3]], [1.0, 0.0, 0.5])
    settings = {"objective__kl_coefficient": 0.25, "objective__kl_estimator": "k1_reward"}
    learner = prepared(make_learner, **settings)
    plain = prepared(make_learner, objective__advantage="dr_grpo")
    (part,) = plain._plan(plain._score([group], LossSums())).batches
    with torch.no_grad():
        reference = learner._logprobs(learner._reference_decoder, part)
    gaps = torch.split(part.generator_logprobs - reference, [len(row.trained) for row in part.rows])
    by_rollout = {
        row.rollout.rollout_index: float(gap.sum())
        for row, gap in zip(part.rows, gaps, strict=True)
    }
    expected = [reward - 0.25 * by_rollout[index] for index, reward in enumerate((1.0, 0.0, 0.5))]
    found = learner._score([group], LossSums())[0]
    assert [row.reward for row in found.rows] == pytest.approx(expected, abs=1e-5)
    _, metrics = outcome(learner, [group])
    assert metrics["learner/reward/trained_mean"] == pytest.approx(sum(expected) / 3, abs=1e-5)
    total = sum(by_rollout.values())
    assert metrics["learner/kl/reference"] == pytest.approx(total / 7, abs=1e-5)


def test_a_kl_in_the_reward_is_no_signal_of_its_own(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    flat = make_group([3, 1, 4], [[1, 5, 9, 2], [6, 5], [3]], [1.0, 1.0, 1.0])
    learner = prepared(
        make_learner, objective__kl_coefficient=0.25, objective__kl_estimator="k1_reward"
    )
    gradient, metrics = outcome(learner, [flat])
    assert metrics["learner/step/num_no_signal"] == 1.0
    assert metrics["learner/groups/num_trained"] == 1.0
    assert gradient


def test_completions_near_the_limit_lose_reward_and_only_those(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    group = make_group([1], [[2] * 8, [3] * 14, [4] * 16], [1.0, 1.0, 0.0])
    learner = prepared(make_learner, objective__overlong={"buffer_tokens": 4, "penalty": 0.5})
    found = learner._score([group], LossSums())[0]
    assert [row.reward for row in found.rows] == pytest.approx([1.0, 0.75, -0.5])


def test_a_batch_estimator_normalises_over_the_step_and_not_over_a_minibatch(
    make_group: MakeGroup, make_learner: MakeLearner
) -> None:
    groups = [
        make_group([1], [[2], [3]], [1.0, 0.0], group_id="0/a"),
        make_group([2], [[4], [5]], [5.0, 5.0], group_id="0/b"),
    ]
    learner = prepared(
        make_learner,
        objective__advantage="reinforce_pp",
        learner__num_minibatches=2,
        max_staleness=1,
    )
    scored = learner._score(groups, LossSums())
    mean, std = 2.75, math.sqrt(sum((r - 2.75) ** 2 for r in (1.0, 0.0, 5.0, 5.0)) / 3)
    found = [row.advantage for group in scored for row in group.rows]
    assert found == pytest.approx([(r - mean) / std for r in (1.0, 0.0, 5.0, 5.0)])


def test_tokens_of_other_versions_have_another_loglinear_ratio(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings: Settings = {"objective__proximal": "loglinear", **STALE_TIS}
    young, _ = outcome(prepared(make_learner, **settings), stale(batch))
    old, _ = outcome(prepared(make_learner, **settings), batch)
    assert difference(old, young) > 1e-3
