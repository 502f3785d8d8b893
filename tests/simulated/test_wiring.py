"""What the controller hands to its parts: versions, seeds, and the updates that a step makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from fakes import FakeGenerator, JournalBuffer, World, evaluation_plan

from headrace.controller import Controller
from headrace.errors import RunError
from headrace.types import GenerationRequest, RolloutGroup, WeightUpdate


@dataclass
class ListeningGenerator(FakeGenerator):
    """Remembers every request it was given."""

    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        self.requests += requests
        async for group in super().generate(requests):
            yield group


@dataclass
class DeafGenerator(FakeGenerator):
    """Goes on with the first weights it was given."""

    async def update_weights(self, update: WeightUpdate) -> None:
        if self.version is None:
            await super().update_weights(update)


@dataclass
class WiredWorld(World):
    """A world with a seed of its own, and steps of several updates."""

    seed: int = 0
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generator = ListeningGenerator(self.journal)
        self.learner.updates = lambda _: self.updates_per_step
        self.buffer = JournalBuffer(
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            updates_per_step=self.updates_per_step,
        )
        self.buffer.journal = self.journal

    def controller(self) -> Controller:
        made = super().controller()
        plan = replace(made._plan, seed=self.seed)
        return Controller(plan, made._parts, watch_seconds=self.watch_seconds)


# --- staleness ------------------------------------------------------------------------------------


def test_a_group_that_is_too_old_for_the_current_weights_ends_the_run() -> None:
    world = WiredWorld(num_steps=10, max_staleness=1)
    world.generator = DeafGenerator(world.journal)

    with pytest.raises(RunError, match=r"token of version 0 .* staleness 2, above .* = 1"):
        world.run()

    assert world.learner.version == 2, "versions 0 and 1 may still train on tokens of version 0"


def test_the_current_version_of_a_resumed_run_is_not_counted_from_zero() -> None:
    world = WiredWorld(num_steps=9, start_step=5, start_version=5, max_staleness=1)
    world.generator = DeafGenerator(world.journal)

    with pytest.raises(RunError, match=r"token of version 5 .* staleness 2, above .* = 1"):
        world.run()

    assert world.learner.version == 7


def test_the_updates_within_a_step_make_its_tokens_staler() -> None:
    # At version 2 a token of version 0 is two updates old when its step begins, three when it ends.
    world = WiredWorld(num_steps=10, max_staleness=2, updates_per_step=2)
    world.generator = DeafGenerator(world.journal)

    with pytest.raises(RunError, match=r"token of version 0 .* staleness 3, above .* = 2"):
        world.run()

    assert world.learner.version == 2


@pytest.mark.parametrize(("max_staleness", "updates"), [(1, 2), (3, 2), (5, 2), (7, 3)])
def test_a_run_of_several_updates_a_step_stays_within_its_bound(
    max_staleness: int, updates: int
) -> None:
    world = WiredWorld(num_steps=20, max_staleness=max_staleness, updates_per_step=updates)
    world.generator.seconds, world.learner.seconds = 0.0005, 0.002

    outcome = world.run()

    assert outcome.policy_version == 20 * updates
    for step, batch in enumerate(world.learner.batches):
        oldest = min(g.oldest_version for g in batch if g.oldest_version is not None)
        last_update = (step + 1) * updates - 1
        assert last_update - oldest <= max_staleness


# --- sampling noise -------------------------------------------------------------------------------


def noise(world: WiredWorld) -> dict[str, list[int]]:
    """Return group id -> the seed of each time it was generated."""
    world.run()
    assert isinstance(world.generator, ListeningGenerator)
    seeds: dict[str, list[int]] = {}
    for request in world.generator.requests:
        seeds.setdefault(request.group_id, []).append(request.seed)
    return seeds


def two_epochs(seed: int, num_steps: int = 4) -> WiredWorld:
    return WiredWorld(
        seed=seed,
        num_steps=num_steps,
        num_prompts=4,
        num_epochs=2,
        evaluation=evaluation_plan(every=1),
    )


def in_training(seeds: dict[str, list[int]]) -> dict[str, int]:
    return {name: drawn for name, (drawn, *_) in seeds.items() if not name.startswith("eval/")}


def in_evaluation(seeds: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: drawn for name, drawn in seeds.items() if name.startswith("eval/")}


def test_training_noise_differs_between_prompts_and_between_epochs_of_one_prompt() -> None:
    seeds = in_training(noise(two_epochs(seed=3)))

    assert set(seeds) == {f"{epoch}/p{n:03d}" for epoch in range(2) for n in range(4)}
    assert len(set(seeds.values())) == 8


def test_noise_differs_between_seeds_of_the_run_and_repeats_for_equal_ones() -> None:
    first, again, other = (noise(two_epochs(seed=seed)) for seed in (3, 3, 4))

    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)


def test_training_noise_does_not_depend_on_the_step_a_prompt_is_drawn_in() -> None:
    whole = in_training(noise(two_epochs(seed=3)))
    # Resumed at step 1 with nothing settled: the same prompts come one step later.
    later = two_epochs(seed=3, num_steps=5)
    later.start_step, later.start_version = 1, 1
    later.learner.version = 1

    assert in_training(noise(later)) == whole


def test_evaluation_noise_is_the_same_at_every_evaluation() -> None:
    seeds = in_evaluation(noise(two_epochs(seed=3)))

    assert all(len(drawn) == 5 for drawn in seeds.values()), "before the first step, then each step"
    assert all(len(set(drawn)) == 1 for drawn in seeds.values())


def test_evaluation_noise_differs_by_mode_and_prompt_and_is_not_that_of_training() -> None:
    seeds = noise(two_epochs(seed=3))
    held_out = {name: drawn[0] for name, drawn in in_evaluation(seeds).items()}

    modes, prompts = ("greedy", "sampled"), ("p000", "p001")
    assert set(held_out) == {f"eval/{mode}/{name}" for mode in modes for name in prompts}
    assert len({*held_out.values(), *in_training(seeds).values()}) == 4 + 8
