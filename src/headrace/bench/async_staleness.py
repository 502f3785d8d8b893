"""The part of `bench async` about staleness: is a token ever trained on that is too old?

The real controller, waves and buffer over 500 steps, at bounds 1, 4 and 8 and with each way to deal
with what is late, while everything takes a random number of turns of the event loop: each token of
a group, its verdicts, a step and a publication. Tokens are labelled as they are sampled, so one
group is of several versions. ``staleness_violations`` counts tokens that a step was given above the
bound, by the learner's own version; ``staleness_max_share`` is the largest staleness seen over its
bound, which shows that the bound is reached.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from headrace.bench.async_roles import Cast, InstantVerifier, VersionSync, rollouts, run_controller
from headrace.bench.result import Figures, Peers, Progress
from headrace.buffer import RolloutBuffer, tokens_by_version
from headrace.errors import GeneratorFailure
from headrace.types import (
    GenerationRequest,
    Late,
    RolloutGroup,
    StepResult,
    Verdict,
    VersionSpan,
    WeightUpdate,
)

NUM_STEPS = 500
BOUNDS = (1, 4, 8)
GROUPS_PER_STEP = 4
GROUP_SIZE = 2
SURPLUS = 2
_LONGEST = {"token": 2, "verdicts": 40, "step": 30, "copy": 5, "publication": 40}
"""In turns of the event loop."""
_MOST_TOKENS = 40


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Run every combination."""
    violations, reached = 0, 1.0
    for bound in BOUNDS:
        for late in get_args(Late):
            learner = run_at(bound, late, NUM_STEPS)
            violations += learner.num_violations
            reached = min(reached, learner.stalest / bound)
            progress(
                f"staleness <= {bound}, {late}: {learner.num_violations} violations in "
                f"{learner.num_tokens} tokens, the stalest {learner.stalest}"
            )
    return {"staleness_violations": float(violations), "staleness_max_share": reached}


def run_at(bound: int, late: Late, num_steps: int, *, seed: int = 0) -> CountingLearner:
    """Return a learner that has made ``num_steps`` at ``bound``."""
    pace = random.Random(f"{seed}/{bound}/{late}")  # noqa: S311 - of delays
    generator = RandomGenerator(pace)
    learner = CountingLearner(pace=pace, bound=bound)
    surplus = SURPLUS if late == "cancel" else 0
    cast = Cast(
        generator=generator,
        verifier=RandomVerifier(pace),
        learner=learner,
        weight_sync=RandomSync(generator, pace),
        buffer=RolloutBuffer(
            groups_per_step=GROUPS_PER_STEP, max_staleness=bound, late=late, surplus=surplus
        ),
    )
    run_controller(
        cast, num_steps=num_steps, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE
    )
    return learner


async def _take(pace: random.Random, what: str) -> None:
    for _ in range(pace.randint(0, _LONGEST[what])):
        await asyncio.sleep(0)


class RandomGenerator:
    """Samples groups side by side, a token now and then, and goes on under new weights."""

    def __init__(self, pace: random.Random) -> None:
        self._pace = pace
        self._version = 0
        self._open: dict[str, bool] = {}
        """Group id -> whether it is to be given up."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[RolloutGroup]:
        """See `Generator`."""
        whole: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        async with asyncio.TaskGroup() as sampling:
            for request in requests:
                self._open[request.group_id] = False
                sampling.create_task(self._sample(request, whole))
            for _ in requests:
                group = await whole.get()
                del self._open[group.group_id]
                yield group

    async def _sample(self, request: GenerationRequest, whole: asyncio.Queue[RolloutGroup]) -> None:
        versions: list[int] = []
        length = self._pace.randint(1, _MOST_TOKENS)
        while len(versions) < length and not (versions and self._open[request.group_id]):
            versions.append(self._version)
            await _take(self._pace, "token")
        group = RolloutGroup(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=rollouts(request.group_size, _spans(versions)),
            sampling=request.sampling,
        )
        whole.put_nowait(group)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `Generator`."""
        self._version = update.policy_version

    async def pause(self) -> None:
        """Nobody asks for it."""

    async def resume(self) -> None:
        """See `pause`."""

    async def abort(self, group_ids: Sequence[str]) -> None:
        """See `Interruptible`."""
        unknown = [name for name in group_ids if name not in self._open]
        if unknown:
            msg = f"asked to abort {unknown}, which are of no open call"
            raise GeneratorFailure(msg)
        self._open.update(dict.fromkeys(group_ids, True))

    def metrics(self) -> Mapping[str, float]:
        """There are none."""
        return {}

    async def close(self) -> None:
        """Holds nothing."""


def _spans(versions: Sequence[int]) -> Sequence[VersionSpan]:
    begins = [n for n, version in enumerate(versions) if n == 0 or version != versions[n - 1]]
    ends = [*begins[1:], len(versions)]
    return [
        VersionSpan(policy_version=versions[begin], start=begin, end=end)
        for begin, end in zip(begins, ends, strict=True)
    ]


class RandomVerifier(InstantVerifier):
    """Takes its time."""

    def __init__(self, pace: random.Random) -> None:
        super().__init__(GROUP_SIZE)
        self._pace = pace

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`."""
        await _take(self._pace, "verdicts")
        return await super().score(group)


class RandomSync(VersionSync):
    """Takes its time to copy the weights, and before the generator has them."""

    def __init__(self, generator: RandomGenerator, pace: random.Random) -> None:
        super().__init__(generator)
        self._pace = pace

    async def publish(self, policy_version: int) -> Awaitable[None]:
        """See `WeightSync`."""
        await _take(self._pace, "copy")
        return self._bring(await super().publish(policy_version))

    async def _bring(self, loading: Awaitable[None]) -> None:
        await _take(self._pace, "publication")
        await loading


@dataclass
class CountingLearner:
    """Counts tokens by how old they are when a step is given them."""

    pace: random.Random
    bound: int
    num_tokens: int = 0
    num_violations: int = 0
    stalest: int = 0
    _version: int = field(default=0)

    async def step(self, groups: Sequence[RolloutGroup]) -> StepResult:
        """See `Learner`."""
        for version, count in tokens_by_version(groups).items():
            staleness = self._version - version
            self.num_tokens += count
            self.num_violations += count if staleness > self.bound else 0
            self.stalest = max(self.stalest, staleness)
        await _take(self.pace, "step")
        self._version += 1
        return StepResult(policy_version=self._version, num_updates=1, metrics={})

    async def save(self, directory: object) -> None:
        """Nothing is kept."""

    async def load(self, directory: object) -> int:
        """Nothing is kept."""
        del directory
        return 0

    async def close(self) -> None:
        """Holds nothing."""
