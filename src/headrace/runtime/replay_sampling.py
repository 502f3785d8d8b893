"""The other half of a replay: groups are sampled again by the weights that sampled them.

A group can be, where all its tokens are of one version and the replay passes through it. Every
random number is a function of its place in the seed tree, so tokens come again; whether every bit
of a log-prob does depends on what was computed together with it, unless the recipe promises
otherwise (``generator.batch_invariant``). Compares and decides nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import zip_longest
from typing import TypeAlias

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.monitors import RecordedStep
from headrace.runtime.generators import build_generator
from headrace.runtime.preflight import PreparedModel
from headrace.runtime.recording import as_recorded, fact
from headrace.runtime.replay_learner import CLOSE_SECONDS
from headrace.runtime.replay_report import Difference, SamplingReport
from headrace.types import (
    GenerationRequest,
    Rollout,
    RolloutGroup,
    WeightUpdate,
    group_seed,
)
from headrace.waves import PausableGenerator

Pairs: TypeAlias = "Sequence[tuple[float | None, float | None]]"
"""What is on record and what was sampled again, token by token; None beyond the end of one."""


def refuse_other_engines(config: RunConfig) -> None:
    """Raise ConfigError unless this process can sample as the run did."""
    engine = config.generator.engine
    if engine != "torch":
        msg = (
            f'--generate: the run sampled with generator.engine = "{engine}", which does not '
            'repeat itself bit for bit; only "torch" does. Leave --generate out'
        )
        raise ConfigError(msg)


class ReplaySampling:
    """Samples the groups of one step again, version by version."""

    def __init__(
        self,
        config: RunConfig,
        model: PreparedModel,
        record: RecordedStep,
        groups: Sequence[RolloutGroup],
    ) -> None:
        self._config = config
        self._model = model
        self._record = record
        self._groups = [group for group in groups if group.oldest_version == group.newest_version]
        self._generator: PausableGenerator | None = None
        self._parts = AsyncExitStack()
        self.report = SamplingReport(
            num_groups=len(groups), is_promised=config.generator.batch_invariant
        )
        self.differences: list[Difference] = []
        """Of rollouts whose bits the recipe promises."""

    async def at(self, published: WeightUpdate) -> None:
        """Sample the groups of this version with its weights, and compare them.

        Raises GeneratorFailure and WeightSyncError.
        """
        version = published.policy_version
        groups = {g.group_id: g for g in self._groups if g.oldest_version == version}
        if not groups:
            return
        # Once: a step without an update begins with these weights as well.
        self._groups = [group for group in self._groups if group.group_id not in groups]
        generator = self._begun()
        await generator.update_weights(published)
        requests = [self._request(group) for group in groups.values()]
        async for found in generator.generate(requests):
            self._compare(groups[found.group_id], found)

    async def close(self) -> None:
        """End the generator, if there is one."""
        await self._parts.aclose()

    def _begun(self) -> PausableGenerator:
        if self._generator is None:
            compute = ComputeThread("generator", int(fact(self._record, "generator_threads")))
            self._parts.push_async_callback(asyncio.to_thread, compute.close, CLOSE_SECONDS)
            run = as_recorded(self._config, self._record)
            if self._config.generator.dtype == "int8":  # of matrices; all else is as recorded
                run = run.model_copy(update={"generator": self._config.generator})
            self._generator = build_generator(run, self._model, compute)
            self._parts.push_async_callback(self._generator.close)
        return self._generator

    def _request(self, group: RolloutGroup) -> GenerationRequest:
        return GenerationRequest(
            group_id=group.group_id,
            prompt=group.prompt,
            group_size=group.group_size,
            sampling=group.sampling,
            seed=group_seed(self._config.seed, group.group_id),
        )

    def _compare(self, recorded: RolloutGroup, found: RolloutGroup) -> None:
        report = self.report
        report.num_sampled += 1
        report.num_rollouts += recorded.group_size
        for one, other in zip(recorded.rollouts, found.rollouts, strict=True):
            if one.completion_ids != other.completion_ids:
                report.num_other_tokens += 1
                pairs = list(zip_longest(one.completion_ids, other.completion_ids))
                self._note(recorded, one, "token", pairs)
            elif one.generator_logprobs != other.generator_logprobs:
                report.num_other_logprobs += 1
                pairs = list(zip(one.generator_logprobs, other.generator_logprobs, strict=True))
                report.largest_gap = max(report.largest_gap, *(abs(a - b) for a, b in pairs))
                self._note(recorded, one, "log-prob", pairs)

    def _note(self, group: RolloutGroup, rollout: Rollout, what: str, pairs: Pairs) -> None:
        """Note the first of ``pairs`` that differs, if the recipe promises that none does."""
        if not self.report.is_promised:
            return
        place = next(place for place, (one, other) in enumerate(pairs) if one != other)
        self.differences.append(
            Difference(
                step=self._record.step,
                name=f"{what} {place} of rollout {rollout.rollout_index} of group {group.group_id}",
                recorded=pairs[place][0],
                recomputed=pairs[place][1],
            )
        )
