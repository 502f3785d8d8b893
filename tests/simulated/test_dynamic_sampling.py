"""Groups without a spread of rewards are replaced until a batch has all its groups, or the run ends
with the reasons."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fakes import Rewards, World, alternating
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dropped import MAX_FAILED_BATCHES, DroppedGroups
from headrace.errors import NoSignalError
from headrace.types import RolloutGroup


def flat_on(names: set[str], reward: float = 1.0) -> Rewards:
    def rewards(group: RolloutGroup) -> Sequence[float | None]:
        if group.group_id in names:
            return [reward] * group.group_size
        return alternating(group)

    return rewards


def test_a_group_without_a_spread_is_replaced_by_the_next_prompt_and_recorded_with_its_reward() -> (
    None
):
    world = World(num_steps=2, max_refills=3)
    world.verifier.rewards = flat_on({"0/p001", "0/p002"}, 0.25)

    world.run()

    assert world.trained() == ["0/p000", "0/p003", "0/p004", "0/p005"]
    reason = "no spread: every reward is 0.25"
    assert world.ledger.settled_groups[2:4] == [(1, "0/p001", reason), (1, "0/p002", reason)]
    counts = [record.metrics["controller/groups/num_refilled"] for record in world.monitor.steps]
    assert counts == [2.0, 0.0]
    assert [record.metrics["verifier/groups/num_dropped"] for record in world.monitor.steps] == [
        0.0,
        0.0,
    ]


def test_without_the_setting_such_groups_are_trained_on() -> None:
    world = World(num_steps=1)
    world.verifier.rewards = flat_on({"0/p001"})

    world.run()

    assert world.trained() == ["0/p000", "0/p001"]


def test_what_replaces_a_group_is_sampled_by_the_same_version_in_a_synchronous_run() -> None:
    world = World(num_steps=3, max_refills=5)
    world.verifier.rewards = flat_on({"0/p000", "0/p003", "0/p005"})

    world.run()

    versions = [[group.oldest_version for group in batch] for batch in world.learner.batches]
    assert versions == [[0, 0], [1, 1], [2, 2]]


def test_a_step_that_no_group_passes_ends_the_run_with_a_table_of_the_reasons() -> None:
    world = World(num_steps=3, max_refills=4)
    world.verifier.rewards = lambda group: [float(group.group_id > "0/p003")] * group.group_size

    with pytest.raises(NoSignalError) as caught:
        world.run()

    text = str(caught.value)
    assert "step 1 never came together within dynamic_sampling.max_refills = 4 times 2" in text
    assert "9 groups were dropped" in text
    assert "5 for: no spread: every reward is 1; 4 for: no spread: every reward is 0" in text


def test_the_bound_is_for_each_step_and_not_for_the_run() -> None:
    world = World(num_steps=4, max_refills=1)
    world.verifier.rewards = flat_on({f"0/p{n:03d}" for n in range(0, 16, 2)})

    world.run()

    assert len(world.trained()) == 8
    assert len(world.dropped()) == 8, "two a step, which is all that one refill allows"


def test_groups_without_verdicts_do_not_use_up_the_refills() -> None:
    world = World(num_steps=1, max_refills=1, groups_per_step=2)
    failing = {f"0/p{n:03d}" for n in range(6)}
    world.verifier.rewards = lambda group: (
        [None] * group.group_size if group.group_id in failing else alternating(group)
    )

    world.run()

    assert world.trained() == ["0/p006", "0/p007"]
    assert len(failing) < MAX_FAILED_BATCHES * 2


def test_the_prompts_may_run_out_while_groups_are_replaced() -> None:
    world = World(num_steps=4, max_refills=10, num_epochs=1, num_prompts=8)
    world.verifier.rewards = flat_on({f"0/p{n:03d}" for n in (1, 4, 5, 6, 7)})

    outcome = world.run()

    assert outcome.num_steps_done == 2, "the last batch is short"
    assert world.trained() == ["0/p000", "0/p002", "0/p003"]
    assert set(world.dropped()) == {f"0/p{n:03d}" for n in (1, 4, 5, 6, 7)}


def test_a_synchronous_run_drops_the_same_groups_however_fast_its_verifier_is() -> None:
    def settled(seed: int) -> list[tuple[int, str, str | None]]:
        draw = random.Random(seed)  # noqa: S311 - test data
        world = World(num_steps=5, max_refills=10, groups_per_step=4)
        world.verifier.seconds = lambda _: draw.random() * 0.004
        world.verifier.rewards = flat_on({f"0/p{n:03d}" for n in range(0, 60, 3)})
        world.run()
        return sorted(world.ledger.settled_groups, key=lambda row: row[:2])

    assert settled(0) == settled(1)


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    max_staleness=st.sampled_from([0, 2]),
    num_prompts=st.integers(4, 24),
    groups_per_step=st.integers(1, 4),
)
def test_every_prompt_is_settled_once_whatever_is_replaced(
    data: st.DataObject, max_staleness: int, num_prompts: int, groups_per_step: int
) -> None:
    names = [f"0/p{n:03d}" for n in range(num_prompts)]
    flat = data.draw(st.sets(st.sampled_from(names), max_size=num_prompts - 1))
    world = World(
        num_steps=num_prompts,
        num_epochs=1,
        num_prompts=num_prompts,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        max_refills=num_prompts,
    )
    world.verifier.rewards = flat_on(flat)

    world.run()

    ended = Counter(group_id for _, group_id, _ in world.ledger.settled_groups)
    assert ended == Counter(names)
    assert set(world.dropped()) == flat


def test_a_rollout_without_a_trained_token_makes_no_spread() -> None:
    world = World(num_steps=1)
    world.run()
    (group, _) = world.learner.batches[0]
    masked = tuple(
        replace(rollout, loss_mask=(False, False)) if index % 2 else rollout
        for index, rollout in enumerate(group.rollouts)
    )
    dropped = DroppedGroups(num_slots=1, max_refills=1)
    assert dropped.lack_of_spread(group) is None
    assert dropped.lack_of_spread(replace(group, rollouts=masked)) == (
        "no spread: every reward is 0"
    )
