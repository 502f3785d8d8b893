"""The weighted sum of components: the one Verifier a run has.

Owns: a reward is the whole sum or None, never a part of it; a cut-off completion is 0 where the
component requires a stop; a component whose gates are not met pays 0 and is not asked; every
component's own reward is kept; whether a rollout passed is decided here alone and told as
`Outcome.PASS`, which is what everyone else counts. Stops the run when too many rollouts in a row
could not be scored. What a completion is worth is decided in the components.
"""

from __future__ import annotations

import asyncio
import graphlib
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import VerifierFailure
from headrace.percentiles import Window
from headrace.types import MAX_REWARD, Outcome, Prompt, Rollout, RolloutGroup, Verdict
from headrace.verifiers.component import (
    Component,
    Measured,
    Resizable,
    RolloutComponent,
    Score,
    Slotted,
)
from headrace.verifiers.slots import SlotFigures, slot_metrics
from headrace.verifiers.suspicions import suspicions

_LOG = logging.getLogger(__name__)
_ROUNDING = 1e-9
"""0.1 + 0.2 + 0.7 reaches a threshold of 1: nobody else may compare a reward with it."""
_PERCENTS = (50, 90, 99)
_KEPT_TIMES = 20_000
"""Of one kind between two readings: the tail is what a step waits for."""
_SEARCHED_AT_ONCE = 10_000
"""Characters that are searched in a few milliseconds."""
_WORST_FIRST = (
    Outcome.INFRA,
    Outcome.VIOLATION,
    Outcome.OOM,
    Outcome.TIMEOUT_WALL,
    Outcome.TIMEOUT_CPU,
    Outcome.OUTPUT_LIMIT,
    Outcome.RUNTIME,
    Outcome.ABSTAIN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedComponent:
    """A component and its part in the sum."""

    component: Component | RolloutComponent
    kind: str = ""
    """Under which its places are counted."""
    weight: float
    require_stop: bool
    decides_pass: bool = True
    """Whether it counts in the sum that the threshold is compared with."""
    gates: tuple[str, ...] = ()
    """Components that must be met first."""
    met_at: float = 1.0
    """What it must pay at least to be met."""

    def is_met(self, reward: float) -> bool:
        """Whether ``reward`` lets the components pass that it is a gate of."""
        return reward >= self.met_at - _ROUNDING


class WeightedVerifier:
    """Scores each rollout of a group with every component, all side by side."""

    def __init__(
        self,
        components: Mapping[str, WeightedComponent],
        *,
        pass_threshold: float,
        max_failed_share: float,
        window: int,
        measured: Sequence[Measured] = (),
    ) -> None:
        """``window``: rollouts of one batch; the share of failures is of the last so many.

        ``measured``: what components share, and whose figures are therefore told once.
        """
        self._measured = tuple(measured)
        self._components = dict(components)
        # Asked once: for a protocol Python looks at every attribute, each time anew.
        self._of_rollouts = {
            name: part.component
            for name, part in components.items()
            if isinstance(part.component, RolloutComponent)
        }
        self._of_texts = {
            name: part.component
            for name, part in components.items()
            if not isinstance(part.component, RolloutComponent)
        }
        order = graphlib.TopologicalSorter({n: part.gates for n, part in components.items()})
        self._gates_first = tuple(order.static_order())
        self._name = "+".join(self._components)
        self._pass_threshold = pass_threshold
        self._max_failed_share = max_failed_share
        self._times: defaultdict[str, Window] = defaultdict(lambda: Window(_KEPT_TIMES))
        self._failures: deque[bool] = deque(maxlen=window)
        self._first_failure: tuple[str, str] | None = None

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """Return one verdict for each rollout, in order.

        Raises VerifierFailure when more than ``max_failed_share`` of the last ``window`` rollouts
        could not be scored.
        """
        scores = await asyncio.gather(
            *(self._score(group.prompt, rollout) for rollout in group.rollouts)
        )
        for rollout_scores in scores:
            self._count(rollout_scores)
        self._check_failures()
        noted = await _suspicions(group)
        return tuple(
            self._verdict(scored, labels) for scored, labels in zip(scores, noted, strict=True)
        )

    def metrics(self) -> Mapping[str, float]:
        """Return how long each kind of component took, and how busy its places were.

        Of the time since the last call; a sandbox's own figures are since its start.
        """
        figures: defaultdict[str, list[SlotFigures]] = defaultdict(list)
        for part in self._components.values():
            if isinstance(part.component, Slotted):
                figures[part.kind].append(part.component.slots.read())
        found = self._take_times()
        for kind, of_kind in figures.items():
            found |= slot_metrics(f"verifier/kind/{kind}", of_kind)
        for shared in self._measured:
            found |= shared.statistics()
        return found

    def _take_times(self) -> dict[str, float]:
        """Return how long answers took since the last call, the wait for a place included."""
        times = {kind: window.percentiles(*_PERCENTS) for kind, window in self._times.items()}
        self._times.clear()
        return {
            f"verifier/kind/{kind}/latency/p{percent}_seconds": seconds
            for kind, found in times.items()
            if found is not None
            for percent, seconds in zip(_PERCENTS, found, strict=True)
        }

    def workers(self) -> Mapping[str, Resizable]:
        """Return what works in processes or cells that there can be more of, by name."""
        found: dict[str, Resizable] = {
            name: part.component
            for name, part in self._components.items()
            if isinstance(part.component, Resizable)
        }
        for shared in self._measured:
            if isinstance(shared, Resizable):
                found["sandbox cells"] = shared
        return found

    async def close(self) -> None:
        """End every process. Idempotent."""
        await asyncio.gather(*(part.component.close() for part in self._components.values()))

    async def _score(self, prompt: Prompt, rollout: Rollout) -> dict[str, Score]:
        """Ask all components side by side, but for those that wait for their gates."""
        tasks: dict[str, asyncio.Task[Score]] = {}
        for name in self._gates_first:
            tasks[name] = asyncio.create_task(self._ask(name, prompt, rollout, tasks))
        # Cancelled together: a rollout that nobody waits for any more frees what it holds.
        scores = await asyncio.gather(*(tasks[name] for name in self._components))
        return dict(zip(self._components, scores, strict=True))

    async def _ask(
        self, name: str, prompt: Prompt, rollout: Rollout, tasks: Mapping[str, asyncio.Task[Score]]
    ) -> Score:
        """Wait for the gates, which ``tasks`` holds already, and ask if they are met."""
        part = self._components[name]
        for gate in part.gates:
            score = await tasks[gate]
            if score.reward is None:
                detail = f"not asked: {gate} could not be scored"
                return Score(outcome=Outcome.ABSTAIN, reward=None, detail=detail)
            if not self._components[gate].is_met(score.reward):
                detail = f"not asked: {gate} paid {score.reward:g}"
                return Score(outcome=Outcome.WRONG, reward=0.0, detail=detail)
        settled = _settled_by_its_end(part, rollout)
        if settled is not None:
            return settled
        asked = time.monotonic()
        if (component := self._of_rollouts.get(name)) is not None:
            score = await component.score_rollout(prompt, rollout)
        else:
            score = await self._of_texts[name].score(prompt, rollout.text)
        self._times[part.kind].add(time.monotonic() - asked)
        return score

    def _verdict(self, scores: Mapping[str, Score], noted: Collection[str]) -> Verdict:
        """Return the verdict. ``noted`` was seen in the text, and changes nothing but labels."""
        reward = self._sum(scores, self._components)
        detail = "; ".join(f"{name}: {score.detail}" for name, score in scores.items())
        components = {name: score.reward for name, score in scores.items()}
        if reward is not None and abs(reward) >= MAX_REWARD:
            detail = f"the weighted sum {reward:g} is out of range; lower the weights ({detail})"
            outcome, reward = Outcome.RUNTIME, None
        elif reward is not None:
            deciding = {name for name, part in self._components.items() if part.decides_pass}
            decided = self._sum(scores, deciding)
            assert decided is not None
            passed = decided >= self._pass_threshold - _ROUNDING
            outcome = Outcome.PASS if passed else _why_not([scores[name] for name in deciding])
        else:
            missing = {score.outcome for score in scores.values() if score.reward is None}
            outcome = next(outcome for outcome in _WORST_FIRST if outcome in missing)
        return Verdict(
            outcome=outcome,
            reward=reward,
            verifier=self._name,
            components=components,
            detail=detail,
            labels=tuple(sorted({*noted, *(x for score in scores.values() for x in score.labels)})),
        )

    def _sum(self, scores: Mapping[str, Score], names: Collection[str]) -> float | None:
        """Return the sum over ``names``, or None as soon as one of them has no reward."""
        terms = []
        for name in names:
            reward = scores[name].reward
            if reward is None:
                return None
            terms.append(self._components[name].weight * reward)
        return math.fsum(terms)

    def _count(self, scores: Mapping[str, Score]) -> None:
        failed = [(name, score) for name, score in scores.items() if score.failed]
        self._failures.append(bool(failed))
        if failed and self._first_failure is None:
            name, score = failed[0]
            self._first_failure = (f"{name}: {score.detail}", score.traceback)
            _LOG.warning("a rollout could not be scored: %s: %s", name, score.detail)

    def _check_failures(self) -> None:
        full = len(self._failures) == self._failures.maxlen
        num_failed = sum(self._failures)
        if not full or num_failed <= self._max_failed_share * len(self._failures):
            return
        assert self._first_failure is not None
        detail, traceback = self._first_failure
        msg = (
            f"{num_failed} of the last {len(self._failures)} rollouts could not be scored "
            f"(verifier.max_failed_share = {self._max_failed_share:g}); the first: {detail}"
        )
        raise VerifierFailure(f"{msg}\n{traceback}".rstrip())


async def _suspicions(group: RolloutGroup) -> list[tuple[str, ...]]:
    """Return the labels of each rollout's text; long ones are searched beside the event loop."""
    prompt, texts = group.prompt.text, [rollout.text for rollout in group.rollouts]
    if sum(map(len, texts)) <= _SEARCHED_AT_ONCE:
        return [suspicions(text, prompt) for text in texts]
    return await asyncio.to_thread(lambda: [suspicions(text, prompt) for text in texts])


def _why_not(scores: Collection[Score]) -> Outcome:
    """Return how a scored rollout failed: a program that ran out of time did not just err."""
    found = {score.outcome for score in scores}
    return next((outcome for outcome in _WORST_FIRST if outcome in found), Outcome.WRONG)


def _settled_by_its_end(part: WeightedComponent, rollout: Rollout) -> Score | None:
    """Return the score that how a rollout ended settles, or None where its text is looked at."""
    match rollout.finish_reason:
        case "abort":
            # Taken back by us: whatever it says so far is not the policy's last word.
            detail = "the rollout was taken back unfinished"
            return Score(outcome=Outcome.INFRA, reward=None, detail=detail)
        case "error":
            detail = "sampling failed: the logits were not finite"
            return Score(outcome=Outcome.INFRA, reward=None, detail=detail)
        case "length" if part.require_stop:
            detail = "cut off by the token limit (require_stop)"
            return Score(outcome=Outcome.WRONG, reward=0.0, detail=detail)
        case _:
            return None
