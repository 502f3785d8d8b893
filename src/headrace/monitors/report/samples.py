"""Which rollouts the report shows beside each other: the first of the run and the last.

Held-out prompts are the same in every evaluation, so there the same prompt is shown before and
after; training steps have prompts of their own. Reads rollout files and chooses; escaping is the
template's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from headrace.monitors.formatting import clipped, number
from headrace.monitors.metrics import evaluation_mode
from headrace.monitors.rollouts import read_rollouts
from headrace.monitors.run_directory import rollout_files
from headrace.types import Outcome, RolloutGroup

MAX_PAIRS = 6
MAX_CHARACTERS = 4000
"""Of a prompt or a completion; a page with a hundred thousand of them would not open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout as the page shows it."""

    prompt_id: str
    source: str
    prompt: str
    answer: str | None
    completion: str
    num_tokens: int
    finish_reason: str
    passed: bool | None
    """None: not scored."""
    reward: str
    outcome: str
    detail: str
    labels: tuple[str, ...]
    """What the completion looks like it tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rollouts of the first file beside rollouts of the last one."""

    title: str
    before: str
    after: str
    pairs: tuple[tuple[Sample | None, Sample | None], ...]


def comparisons_of(run_directory: Path) -> Iterator[Comparison]:
    """Yield the held-out and the training comparison, where there are rollouts to show.

    Raises RunDirectoryError when a rollout file is damaged.
    """
    evaluations = [entry for entry in rollout_files(run_directory) if entry[1] == "eval"]
    steps = [entry for entry in rollout_files(run_directory) if entry[1] == "step"]
    if len(evaluations) > 1:
        (first, _, start), (last, _, end) = evaluations[0], evaluations[-1]
        pairs = _held_out_pairs(read_rollouts(first), read_rollouts(last))
        yield Comparison(
            title="The same held-out prompts, before and after",
            before=f"after step {start}",
            after=f"after step {end}",
            pairs=tuple(pairs),
        )
    if steps:
        (first, _, start), (last, _, end) = steps[0], steps[-1]
        left = _spread(read_rollouts(first))
        right = _spread(read_rollouts(last)) if last != first else []
        yield Comparison(
            title="Training rollouts of the first and the last step",
            before=f"step {start}",
            after=f"step {end}",
            pairs=tuple(zip_longest(left, right)),
        )


def _held_out_pairs(
    before: Sequence[RolloutGroup], after: Sequence[RolloutGroup]
) -> list[tuple[Sample | None, Sample | None]]:
    """Return prompts of both evaluations: solved since, solved in neither, lost, always solved."""
    left, right = _by_prompt(before), _by_prompt(after)
    pairs = [(left[prompt_id], right[prompt_id]) for prompt_id in left if prompt_id in right]
    kinds: dict[tuple[bool, bool], list[tuple[Sample | None, Sample | None]]] = {
        (False, True): [],
        (False, False): [],
        (True, False): [],
        (True, True): [],
    }
    for old, new in pairs:
        kinds[bool(old.passed), bool(new.passed)].append((old, new))
    rounds = zip_longest(*kinds.values())
    return [pair for each in rounds for pair in each if pair is not None][:MAX_PAIRS]


def _by_prompt(groups: Sequence[RolloutGroup]) -> Mapping[str, Sample]:
    """Return the first rollout of each prompt: the greedy one where there is one."""
    ordered = sorted(groups, key=lambda group: evaluation_mode(group) != "greedy")
    samples: dict[str, Sample] = {}
    for group in ordered:
        if group.rollouts and group.prompt.prompt_id not in samples:
            samples[group.prompt.prompt_id] = _sample(group, 0)
    return samples


def _spread(groups: Sequence[RolloutGroup]) -> list[Sample]:
    """Return rollouts of different groups, in turn one that passed and one that did not."""
    chosen: list[Sample] = []
    for place, group in enumerate(group for group in groups if group.rollouts):
        if len(chosen) == MAX_PAIRS:
            break
        wanted = place % 2 == 0
        indices = range(group.group_size)
        index = next((k for k in indices if _passed(group, k) is wanted), 0)
        chosen.append(_sample(group, index))
    return chosen


def _passed(group: RolloutGroup, index: int) -> bool | None:
    if group.verdicts is None or group.verdicts[index].reward is None:
        return None
    return group.verdicts[index].outcome is Outcome.PASS


def _sample(group: RolloutGroup, index: int) -> Sample:
    rollout, prompt = group.rollouts[index], group.prompt
    verdict = group.verdicts[index] if group.verdicts is not None else None
    scored = verdict is not None and verdict.reward is not None
    return Sample(
        prompt_id=prompt.prompt_id,
        source=prompt.source,
        prompt=clipped(prompt.text, MAX_CHARACTERS),
        answer=None if prompt.answer is None else clipped(prompt.answer, MAX_CHARACTERS),
        completion=clipped(rollout.text, MAX_CHARACTERS),
        num_tokens=len(rollout.completion_ids),
        finish_reason=rollout.finish_reason,
        passed=_passed(group, index),
        reward=number(verdict.reward) if scored and verdict and verdict.reward is not None else "",
        outcome=verdict.outcome.value if verdict is not None else "not scored",
        detail=clipped(verdict.detail, MAX_CHARACTERS) if verdict is not None else "",
        labels=verdict.labels if verdict is not None else (),
    )
