"""From scored groups to the rows of a minibatch: who trains, with what advantage and weight.

Owns two facts: which rollouts can change the gradient at all, and the one global denominator, which
is fixed over the whole minibatch before anything is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from headrace.config import OverlongConfig
from headrace.errors import RunError
from headrace.objectives.advantages import AdvantageEstimator, Rewards, advantages
from headrace.objectives.aggregation import Aggregation, aggregation_weights
from headrace.objectives.rewards import overlong_penalty
from headrace.types import Rollout, RolloutGroup, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One rollout that takes part in the loss."""

    rollout: Rollout
    advantage: float
    weight: float
    """What one of its tokens counts: 1 / (the global denominator's share)."""
    reward: float = 0.0
    """As it is trained on; a critic reads it."""
    proximal_logprobs: tuple[float, ...] | None = None
    """Of its trained tokens, where they are known before the minibatch's pass."""
    trained: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """[at least 1] places in the completion of the tokens trained on."""

    def __post_init__(self) -> None:
        """Find them once: packing reads them many times."""
        mask = self.rollout.loss_mask
        object.__setattr__(self, "trained", tuple(compress(range(len(mask)), mask)))

    @property
    def num_inputs(self) -> int:
        """Completion tokens that are fed in: all before the last one trained on."""
        return self.trained[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """Rows that share one prompt."""

    prompt_ids: tuple[int, ...]
    rows: tuple[TrainingRow, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens one forward pass over the group computes."""
        return len(self.prompt_ids) + sum(row.num_inputs for row in self.rows)

    @property
    def longest(self) -> int:
        """Length of its longest sequence."""
        return len(self.prompt_ids) + max(row.num_inputs for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A rollout with a verdict and at least one trained token."""

    rollout: Rollout
    reward: float
    """As it is trained on."""
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The rollouts of one prompt that have a vote."""

    prompt_ids: tuple[int, ...]
    rows: tuple[ScoredRow, ...]

    @property
    def has_signal(self) -> bool:
        """Whether the policy gradient of some rollout is not exactly 0."""
        return any(row.advantage != 0.0 for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What one minibatch trains on, and what it leaves out because it cannot matter."""

    groups: tuple[TrainingGroup, ...]
    num_no_spread: int
    """Groups all of whose advantages are 0, or that have no row: their policy gradient is 0."""
    trained_rewards: tuple[float, ...]
    """Rewards of the rollouts in ``groups``."""


def plain_rollout(length: int) -> Rollout:
    """Return one of ``length`` tokens that every vocabulary has, for passes that teach nothing."""
    return Rollout(
        rollout_index=0,
        completion_ids=(0,) * length,
        loss_mask=(True,) * length,
        generator_logprobs=(-1.0,) * length,
        version_spans=(VersionSpan(policy_version=0, start=0, end=length),),
        finish_reason="length",
        text="",
    )


def unweighted(groups: Sequence[RolloutGroup]) -> list[TrainingGroup]:
    """Return every rollout with no advantage and no weight, for reading log-probs alone."""
    return [
        TrainingGroup(
            prompt_ids=group.prompt.token_ids,
            rows=tuple(TrainingRow(rollout=r, advantage=0.0, weight=0.0) for r in group.rollouts),
        )
        for group in groups
    ]


def refuse_too_long(groups: Sequence[RolloutGroup], max_positions: int) -> None:
    """Raise RunError for a rollout that is longer than the model's context.

    Its last token is predicted and never fed in, so it needs no position.
    """
    for group in groups:
        for rollout in group.rollouts:
            prompt, completion = len(group.prompt.token_ids), len(rollout.completion_ids)
            if prompt + completion - 1 > max_positions:
                msg = (
                    f"group {group.group_id}, rollout {rollout.rollout_index}: {prompt} prompt and "
                    f"{completion} completion tokens are more than the model's {max_positions} "
                    "positions; lower data.max_prompt_tokens or sampling.max_tokens"
                )
                raise RunError(msg)


def trained_rewards(groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
    """Return the verified reward of each rollout, None without a verdict or a trained token."""
    return [
        [
            reward if any(rollout.loss_mask) else None
            for rollout, reward in zip(group.rollouts, group.rewards, strict=True)
        ]
        for group in groups
    ]


def less_overlong(
    groups: Sequence[RolloutGroup],
    rewards: Sequence[Rewards],
    overlong: OverlongConfig,
    max_tokens: int,
) -> list[list[float | None]]:
    """Return ``rewards`` less the punishment of each completion's length."""
    return [
        [
            None
            if reward is None
            else reward
            + overlong_penalty(
                len(rollout.completion_ids),
                max_tokens=max_tokens,
                buffer_tokens=overlong.buffer_tokens,
                penalty=overlong.penalty,
            )
            for rollout, reward in zip(group.rollouts, own, strict=True)
        ]
        for group, own in zip(groups, rewards, strict=True)
    ]


def score(
    groups: Sequence[RolloutGroup], rewards: Sequence[Rewards], *, estimator: AdvantageEstimator
) -> list[ScoredGroup]:
    """Give each rollout with a reward its advantage within ``groups``, a whole batch."""
    lengths = [[sum(rollout.loss_mask) for rollout in group.rollouts] for group in groups]
    found = advantages(rewards, lengths, estimator=estimator)
    return [
        ScoredGroup(
            prompt_ids=group.prompt.token_ids,
            rows=tuple(
                ScoredRow(rollout=rollout, reward=reward, advantage=advantage)
                for rollout, reward, advantage in zip(group.rollouts, own, values, strict=True)
                if reward is not None and advantage is not None
            ),
        )
        for group, own, values in zip(groups, rewards, found, strict=True)
    ]


def select(
    groups: Sequence[ScoredGroup],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    keep_no_spread: bool,
) -> Selection:
    """Choose the rows of a minibatch and give each its weight.

    Groups without a signal keep their share of the denominator, whether or not they are computed
    (``keep_no_spread``), so leaving them out changes no gradient.
    """
    lengths = [sum(row.rollout.loss_mask) for group in groups for row in group.rows]
    weights = iter(aggregation_weights(lengths, aggregation=aggregation, max_tokens=max_tokens))
    chosen: list[TrainingGroup] = []
    rewards: list[float] = []
    for group in groups:
        weighted = tuple(
            TrainingRow(
                rollout=row.rollout,
                advantage=row.advantage,
                weight=next(weights),
                reward=row.reward,
            )
            for row in group.rows
        )
        if weighted and (group.has_signal or keep_no_spread):
            chosen.append(TrainingGroup(prompt_ids=group.prompt_ids, rows=weighted))
            rewards += [row.reward for row in group.rows]
    return Selection(
        groups=tuple(chosen),
        num_no_spread=sum(not group.has_signal for group in groups),
        trained_rewards=tuple(rewards),
    )
