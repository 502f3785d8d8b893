"""`[objective]`: what training maximises. docs/OBJECTIVES.md has every formula and its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from headrace.config.correction import PRESETS, CorrectionConfig
from headrace.config.critic import CriticConfig
from headrace.config.section import Section

ClipLow = Annotated[float, Field(ge=0.0, le=1.0)]
ClipHigh = Annotated[float, Field(ge=0.0)]


class PpoClipLoss(Section):
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    type: Literal["ppo_clip"]
    """Tells the kind of loss."""
    clip_low: ClipLow = 0.2
    """Lower distance of the clip from 1."""
    clip_high: ClipHigh = 0.2
    """Upper distance of the clip from 1; larger than ``clip_low`` is DAPO's clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """c: where A < 0 the objective is at least c A; null: unbounded."""


class ReinforceLoss(Section):
    """A q, with no ratio: what another policy sampled needs a weight."""

    type: Literal["reinforce"]
    """Tells the kind of loss."""


class CispoLoss(Section):
    """clip(r, min_ratio, max_ratio) A q with the clipped ratio a constant."""

    type: Literal["cispo"]
    """Tells the kind of loss."""
    min_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Least factor; 0 bounds it from above alone."""
    max_ratio: float = Field(default=5.0, ge=1.0)
    """Largest factor."""


class GspoLoss(Section):
    """The clipped objective with one ratio a rollout, e^(mean of q - p)."""

    type: Literal["gspo"]
    """Tells the kind of loss."""
    level: Literal["sequence", "token"] = "sequence"
    """Of the gradient: through the rollout's ratio, or token by token with that ratio a factor."""
    clip_low: ClipLow = 3e-4
    """Lower distance of the clip from 1."""
    clip_high: ClipHigh = 4e-4
    """Upper distance of the clip from 1."""


class GmpoLoss(Section):
    """A times the geometric mean of a rollout's clipped token ratios."""

    type: Literal["gmpo"]
    """Tells the kind of loss."""
    clip_low: float = Field(default=0.4, ge=0.0)
    """Lower bound of log r, negated."""
    clip_high: float = Field(default=0.4, ge=0.0)
    """Upper bound of log r."""


class SapoLoss(Section):
    """(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of a clip."""

    type: Literal["sapo"]
    """Tells the kind of loss."""
    tau_positive: float = Field(default=1.0, gt=0.0)
    """tau where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """tau elsewhere; larger fades sooner."""


class DppoTvLoss(Section):
    """A e^(q - mu), for tokens whose probability has not moved too far the way A pushes."""

    type: Literal["dppo_tv"]
    """Tells the kind of loss."""
    delta: float = Field(default=0.2, gt=0.0, lt=1.0)
    """How far a token's probability may move."""
    anchor: float = Field(default=0.0, ge=0.0)
    """Weight of (q - mu)^2, which is taken from the objective of every token."""


LossConfig = Annotated[
    PpoClipLoss | ReinforceLoss | CispoLoss | GspoLoss | GmpoLoss | SapoLoss | DppoTvLoss,
    Field(discriminator="type"),
]

_DEFAULTS = ("ppo_clip", "reinforce", "cispo", "gspo", "gmpo", "sapo", "dppo_tv")
LOSSES: Mapping[str, Mapping[str, object]] = {
    **{name: {"type": name} for name in _DEFAULTS},
    "prime": {"type": "dppo_tv", "delta": 0.2, "anchor": 1e-3},
}
"""Name -> the table it stands for: each loss with its defaults, and one preset."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment: a term of the reward, for completions near the limit."""

    buffer_tokens: int = Field(ge=1)
    """Tokens before ``sampling.max_tokens`` over which the punishment grows from 0."""
    penalty: float = Field(default=1.0, gt=0.0)
    """What a completion of ``sampling.max_tokens`` tokens loses."""


BEYOND_GROUPS = ("reinforce_pp", "gae", "vtrace")
"""Advantages that compare a rollout with others than those of its prompt."""
OBJECTIVES: Mapping[str, Mapping[str, object]] = {
    "ppo": {"advantage": "gae"},
    "impala": {"advantage": "vtrace", "loss": "reinforce"},
}
"""Name -> the table it stands for: objectives that are more than a loss and a correction."""


class ObjectiveConfig(Section):
    """The loss. docs/OBJECTIVES.md names the symbols."""

    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "rloo_std",
        "opo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "vtrace",
    ] = "grpo"
    """``grpo``: (R - mean) / std of the group; ``dr_grpo``: R - mean; ``rloo``: R - mean of the
    others, ``rloo_std``: over the std; ``opo``: R - mean weighted by length; ``reinforce_pp``:
    (R - mean) / std of the batch; ``reinforce_pp_baseline``: R - mean of the group, over the std
    of that in the batch; ``gae``, ``vtrace``: a critic's, token by token."""
    critic: CriticConfig = CriticConfig()
    """The value head of ``gae`` and ``vtrace``."""
    overlong: OverlongConfig | None = None
    """Punish completions near the token limit; null does not."""
    loss: LossConfig = PpoClipLoss(type="ppo_clip")
    """What a token adds: a table, or the name of one as in `LOSSES`."""
    proximal: Literal["generator", "recompute", "loglinear"] = "generator"
    """p, which the ratio r = e^(q - p) is to: the log-probs the generator reported; the learner's
    own forward pass before the first update of the step; or, without such a pass, between the
    generator's and the current ones by the versions of each token."""
    correction: CorrectionConfig = CorrectionConfig()
    """What is done about tokens that another distribution sampled than p (older weights, coarser
    arithmetic): a table, or the name of one as in `PRESETS`."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Divide the sum by all tokens of the batch, by each rollout's tokens and then the rollouts,
    or by rollouts times ``sampling.max_tokens``."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of KL(policy || start); 0 keeps no reference model."""
    kl_estimator: Literal["k3", "k2", "k1_reward"] = "k3"
    """``k2``, ``k3``: that estimate of each token, in the loss; ``k1_reward``: the sum of mu - ref
    over the rollout, taken from its reward."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of each token's entropy, which is added to its objective."""

    @field_validator("loss", mode="before")
    @classmethod
    def _named_loss(cls, value: object) -> object:
        return table_of("objective.loss", value, LOSSES)

    @field_validator("correction", mode="before")
    @classmethod
    def _named_correction(cls, value: object) -> object:
        return table_of("objective.correction", value, PRESETS)

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coefficient > 0 and self.kl_estimator != "k1_reward"

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a value head."""
        return self.advantage in {"gae", "vtrace"}

    @property
    def pulls_without_advantage(self) -> bool:
        """Whether a rollout of advantage 0 has a gradient."""
        is_anchored = isinstance(self.loss, DppoTvLoss) and self.loss.anchor > 0
        is_pulled = self.kl_in_loss or self.entropy_coefficient > 0 or is_anchored
        return is_pulled or self.has_critic


def table_of(key: str, value: object, named: Mapping[str, Mapping[str, object]]) -> object:
    """Return the table that a name stands for, and everything else as it is."""
    if not isinstance(value, str):
        return value
    if value not in named:
        names = ", ".join(f'"{name}"' for name in named)
        msg = f'{key} = "{value}": must be a table, or one of {names}'
        raise ValueError(msg)
    return dict(named[value])
