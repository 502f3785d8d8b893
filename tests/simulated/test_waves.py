"""What is under way at once: waves that overlap, groups that take long, what is given up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fakes import FakeGenerator, World, alternating

from headrace.buffer import staleness_metrics
from headrace.errors import GeneratorFailure
from headrace.types import GenerationRequest, RolloutGroup, Verdict, VersionSpan
from headrace.waves import LATE


@dataclass
class ParallelGenerator(FakeGenerator):
    """Samples all groups side by side, each with the version at its beginning; can give up."""

    turns: Callable[[str], int] = lambda _: 1
    """Of the event loop, that a group takes."""
    open: dict[str, asyncio.Event] = field(default_factory=dict)
    """Set to give a group up."""
    aborted: list[str] = field(default_factory=list)
    most_open: int = 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        self.journal.append(("generate", [request.group_id for request in requests]))
        done: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        async with asyncio.TaskGroup() as sampling:
            for request in requests:
                self.open[request.group_id] = asyncio.Event()
                sampling.create_task(self._sample(request, self._group(request), done))
            self.most_open = max(self.most_open, len(self.open))
            for _ in requests:
                group = await done.get()
                # Open until it was yielded, as the role says.
                del self.open[group.group_id]
                yield group

    async def _sample(
        self, request: GenerationRequest, group: RolloutGroup, done: asyncio.Queue[RolloutGroup]
    ) -> None:
        for _ in range(self.turns(request.group_id)):
            if self.open[request.group_id].is_set():
                rollouts = (replace(r, finish_reason="abort") for r in group.rollouts)
                group = replace(group, rollouts=tuple(rollouts))
                break
            await asyncio.sleep(0.001)
        self.num_groups += 1
        done.put_nowait(group)

    async def abort(self, group_ids: Sequence[str]) -> None:
        unknown = [name for name in group_ids if name not in self.open]
        if unknown:
            msg = f"{unknown} are of no open call"
            raise GeneratorFailure(msg)
        self.aborted += group_ids
        for name in group_ids:
            self.open[name].set()


def world(turns: Callable[[str], int] = lambda _: 1, **options: Any) -> World:  # noqa: ANN401 - of World
    made = World(**options)
    made.generator = ParallelGenerator(made.journal, turns=turns)
    return made


def generator(of: World) -> ParallelGenerator:
    assert isinstance(of.generator, ParallelGenerator)
    return of.generator


def slow(*names: str, turns: int = 60) -> Callable[[str], int]:
    return lambda name: turns if name in names else 1


def stalest(of: World) -> list[float]:
    return [record.metrics["learner/staleness/max"] for record in of.monitor.steps]


def test_a_slow_group_does_not_keep_free_slots_from_being_filled() -> None:
    at = world(slow("0/p000", turns=40), num_steps=4, max_staleness=3)

    at.run()

    waves = [names for kind, names in at.journal if kind == "generate"]
    first_step = at.kinds().index("step")
    assert len([kind for kind in at.kinds()[:first_step] if kind == "generate"]) == 4
    assert all(len(names) == 2 for names in waves)
    assert at.trained() == [f"0/p{n:03d}" for n in range(8)], "batches wait all the same"


def test_without_staleness_no_two_waves_overlap() -> None:
    at = world(num_steps=4)

    at.run()

    assert generator(at).most_open == 2
    order = [kind for kind in at.kinds() if kind in {"generate", "release"}]
    assert order == ["release", "generate"] * 4


def test_what_is_late_is_carried_over_to_a_later_batch_within_the_bound() -> None:
    at = world(
        slow("0/p000"), num_steps=6, max_staleness=2, pipeline={"late": "carry_over"}, num_epochs=1,
        num_prompts=12,
    )  # fmt: skip

    at.run()

    batches = [[group.group_id for group in batch] for batch in at.learner.batches]
    assert batches[0] == ["0/p001", "0/p002"]
    assert "0/p000" in batches[2], "the last batch that may hold it waits for it"
    assert sorted(at.trained()) == [f"0/p{n:03d}" for n in range(12)]
    assert not at.dropped()
    assert max(stalest(at)) <= 2


def test_what_is_late_is_given_up_its_prompt_recorded_and_its_slot_free() -> None:
    at = world(
        slow("0/p001", "0/p004"), num_steps=3, num_epochs=1, num_prompts=100,
        pipeline={"late": "cancel", "surplus": 1},
    )  # fmt: skip

    at.run()

    assert generator(at).aborted == ["0/p001", "0/p004"]
    assert at.trained() == ["0/p000", "0/p002", "0/p003", "0/p005", "0/p006", "0/p007"]
    assert at.dropped() == ["0/p001", "0/p004"]
    assert {reason for _, _, reason in at.ledger.settled_groups if reason} == {LATE}
    late = [record.metrics["controller/groups/num_late"] for record in at.monitor.steps]
    assert sum(late) == 2.0, "each in the step in which it came back"
    assert stalest(at) == [0.0, 0.0, 0.0]
    assert at.buffer._num_free == at.buffer.num_slots - 2, "those of the last batch"


def test_a_group_that_is_whole_and_too_many_is_dropped_with_the_same_reason() -> None:
    at = world(num_steps=2, num_epochs=1, pipeline={"late": "cancel", "surplus": 2})

    at.run()

    assert not generator(at).aborted
    assert at.trained() == ["0/p000", "0/p001", "0/p004", "0/p005"]
    assert at.dropped() == ["0/p002", "0/p003"]


def test_what_is_being_scored_when_its_batch_leaves_is_given_up_too() -> None:
    at = world(num_steps=2, num_epochs=1, pipeline={"late": "cancel", "surplus": 1})
    at.verifier.seconds = lambda name: 3600.0 if name == "0/p001" else 0.0

    at.run()

    assert at.trained() == ["0/p000", "0/p002", "0/p003", "0/p004"]
    assert at.dropped() == ["0/p001"]
    assert at.verifier.in_flight == set()


def test_the_last_step_draws_no_surplus_and_waits_for_what_it_has() -> None:
    at = world(
        slow("0/p003", turns=20), num_steps=1, num_epochs=1, groups_per_step=4,
        pipeline={"late": "cancel", "surplus": 3},
    )  # fmt: skip

    at.run()

    assert at.trained() == [f"0/p{n:03d}" for n in range(4)]
    assert generator(at).num_groups == 4


def test_at_the_end_of_the_prompts_everything_late_is_on_record() -> None:
    at = world(
        lambda name: 1 + 3 * (int(name[-3:]) % 3), num_steps=50, num_epochs=1, num_prompts=20,
        pipeline={"late": "cancel", "surplus": 2},
    )  # fmt: skip

    at.run()

    ended = Counter(group_id for _, group_id, _ in at.ledger.settled_groups)
    assert ended == Counter(f"0/p{n:03d}" for n in range(20))
    assert at.dropped()


@pytest.mark.parametrize("late", ["wait", "carry_over", "cancel"])
@pytest.mark.parametrize("max_staleness", [1, 4, 8])
def test_no_batch_is_staler_than_allowed_whatever_takes_how_long(
    late: str, max_staleness: int
) -> None:
    pipeline = {"late": late, "surplus": 2 if late == "cancel" else 0}
    at = world(
        lambda name: int(name[-3:]) * 7 % 11, num_steps=60, max_staleness=max_staleness,
        num_epochs=1, num_prompts=400, pipeline=pipeline,
    )  # fmt: skip
    at.verifier.seconds = lambda name: 0.001 * (int(name[-3:]) * 5 % 7)
    at.verifier.rewards = lambda group: (
        [None] * 4 if int(group.group_id[-3:]) % 9 == 0 else alternating(group)
    )

    at.run()

    assert max(stalest(at)) <= max_staleness
    settled = [group_id for _, group_id, _ in at.ledger.settled_groups]
    assert len(set(settled)) == len(settled)
    assert len(at.trained()) == 120


def test_a_generator_that_knows_a_late_group_not_yet_does_not_end_the_run() -> None:
    pipeline = {"late": "cancel", "surplus": 1}
    at = world(slow("0/p001"), num_steps=3, num_epochs=1, pipeline=pipeline)

    async def abort(group_ids: Sequence[str]) -> None:
        msg = f"{group_ids} are of no open call"
        raise GeneratorFailure(msg)

    generator(at).abort = abort  # type: ignore[method-assign] - this one alone

    assert at.run().num_steps_done == 3
    assert at.dropped()[:1] == ["0/p001"]


def test_the_depth_bounds_what_is_generated_ahead_of_the_learner() -> None:
    at = world(num_steps=6, max_staleness=8, pipeline={"depth": 2})
    at.learner.seconds = 0.01

    at.run()

    assert max(stalest(at)) == 1
    assert generator(at).most_open <= 4


def test_no_part_of_a_step_that_runs_ahead_takes_longer_than_the_run() -> None:
    at = world(lambda name: 1 + int(name[-3:]) % 9, num_steps=12, max_staleness=3)
    at.verifier.seconds = lambda name: 0.002 * (int(name[-3:]) % 4)
    at.learner.seconds = 0.003
    began = time.monotonic()

    at.run()

    whole = time.monotonic() - began
    for record in at.monitor.steps:
        parts = ("generate", "score", "wait", "update", "publish")
        seconds = [record.metrics[f"controller/time/{part}_seconds"] for part in parts]
        assert min(seconds) >= 0.0
        assert max(seconds) <= whole


def test_every_group_under_way_is_told_by_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = world(num_steps=3, max_staleness=3)
    told, arrived = asyncio.Event(), set[str]()
    sample, score = ParallelGenerator._sample, at.verifier.score

    async def sample_late(
        generator: ParallelGenerator,
        request: GenerationRequest,
        *rest: Any,  # noqa: ANN401 - as there
    ) -> None:
        if request.group_id == "0/p004":
            await told.wait()
        await sample(generator, request, *rest)

    async def score_late(group: RolloutGroup) -> tuple[Verdict, ...]:
        arrived.add(group.group_id)
        match group.group_id:
            case "0/p000":  # of the first batch, which waits until all others are where they wait
                while len(arrived) < 5:  # noqa: ASYNC110 - nobody says so
                    await asyncio.sleep(0)
                for _ in range(200):  # turns of the loop, not seconds
                    await asyncio.sleep(0)
            case "0/p005":
                await told.wait()
        return await score(group)

    monkeypatch.setattr(ParallelGenerator, "_sample", sample_late)
    monkeypatch.setattr(at.verifier, "score", score_late)
    at.monitor.on_each_step = lambda _: told.set()

    at.run()

    first = at.monitor.steps[0].metrics
    kinds = ("generating", "scoring", "ready")
    found = {kind: first[f"controller/groups/num_{kind}"] for kind in kinds}
    assert found == {"generating": 1.0, "scoring": 1.0, "ready": 2.0}


def test_a_batch_is_told_by_the_staleness_of_its_tokens() -> None:
    at = World()
    at.generator.version = 3
    request = GenerationRequest(
        group_id="g", prompt=at.controller()._parts.stream.draw().prompt, group_size=1,  # type: ignore[union-attr] - there is one
        sampling=at.controller()._plan.sampling, seed=0,
    )  # fmt: skip
    group = at.generator._group(request)
    spans = (
        VersionSpan(policy_version=3, start=0, end=1),
        VersionSpan(policy_version=5, start=1, end=2),
    )
    went_on = replace(group, rollouts=(replace(group.rollouts[0], version_spans=spans),))
    at.ledger.close()

    assert staleness_metrics([group, went_on], 5, num_updates=3) == {
        "learner/staleness/max": 4.0,
        "learner/staleness/mean": 1.5,
        "learner/staleness/num_tokens_0": 1.0,
        "learner/staleness/num_tokens_2": 3.0,
    }
    assert staleness_metrics([], 5, num_updates=0) == {"learner/staleness/max": 0.0}
