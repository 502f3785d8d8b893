"""`[objective.correction]`: what is done about tokens that another distribution sampled.

A preset is a name for such a table: `PRESETS` says which. Read, it is that table and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config.section import Section

LARGEST_BOUND = 1e8
"""Of weights. They are finite because they end at e^20 = 4.9e8; a bound beyond bounds nothing."""


class WeightConfig(Section):
    """What a token counts: e^d, d = p - mu, at a level and within bounds."""

    level: Literal["token", "sequence", "geometric"]
    """d of the token, or the sum or the mean of d over its rollout."""
    mode: Literal["truncate", "clip", "mask"]
    """``truncate``: at most ``high``; ``clip``: within [low, high]; ``mask``: rejected outside."""
    low: float | None = Field(default=None, gt=0.0, le=LARGEST_BOUND)
    """Least weight of ``clip``, and of ``mask`` where null means none."""
    high: float = Field(gt=0.0, le=LARGEST_BOUND)
    """Largest weight."""

    @model_validator(mode="after")
    def _bounds_that_are_read(self) -> Self:
        if self.mode == "truncate" and self.low is not None:
            msg = f'low = {self.low:g} with mode = "truncate": nothing reads it; use mode = "clip"'
            raise ValueError(msg)
        if self.mode == "clip" and self.low is None:
            msg = 'mode = "clip" without low: that is mode = "truncate"; give low or use it'
            raise ValueError(msg)
        if self.low is not None and self.low >= self.high:
            msg = f"low = {self.low:g} is not below high = {self.high:g}"
            raise ValueError(msg)
        return self


class RejectionConfig(Section):
    """Which rollouts are rejected whole, by how far they are from their generator."""

    divergence: Literal["k1", "k2", "k3"]
    """Of a token: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` = e^d - 1 - d."""
    reduction: Literal["sum", "mean", "max"]
    """Over the rollout."""
    low: float | None = Field(default=None, gt=0.0, le=1.0)
    """With ``k1`` alone: least ratio e^(sum d) or e^(mean d), or e^d of a token; null: none."""
    high: float = Field(gt=0.0, le=LARGEST_BOUND)
    """With ``k1`` the largest ratio, which is the generator's own at 1; else the largest value."""

    @model_validator(mode="after")
    def _bounds_that_are_read(self) -> Self:
        if self.divergence != "k1" and self.low is not None:
            msg = (
                f'low = {self.low:g} with divergence = "{self.divergence}": it is never negative, '
                "and 0 is where both agree; remove it"
            )
            raise ValueError(msg)
        if self.divergence == "k1" and self.high < 1.0:
            msg = (
                f'high = {self.high:g} with divergence = "k1": it bounds the ratio, so a rollout '
                "on which both agree, whose ratio is 1, would be rejected; use 1 or more"
            )
            raise ValueError(msg)
        return self


class CorrectionConfig(Section):
    """Weights and rejection; without any of them nothing is corrected.

    Rejected tokens have no part in any term of the loss. All but ``off_policy_mask`` compare the
    proximal log-probs with the generator's.
    """

    weight: WeightConfig | None = None
    """What each token counts; null: 1. Applies to the policy's term alone."""
    rejection: RejectionConfig | None = None
    """Rollouts that are rejected; null: none."""
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Reject a rollout with a token whose e^d is below this."""
    off_policy_mask: float | None = Field(default=None, gt=0.0)
    """Reject a rollout of negative advantage where the mean of mu - q is above this; nats."""
    m2po: float | None = Field(default=None, gt=0.0)
    """Reject the tokens of largest d^2 until the mean of d^2 over the rest is at most this."""
    count_rejected: bool = True
    """Whether rejected tokens count in the denominator of the loss."""

    @property
    def compares_proximal(self) -> bool:
        """Whether anything here reads d."""
        return any(part is not None for part in (self.weight, self.rejection, self.veto, self.m2po))

    @property
    def bounds_gap(self) -> bool:
        """Whether rollouts of older policies are weighed or sorted out by d."""
        return any(part is not None for part in (self.weight, self.rejection, self.m2po))

    @property
    def rejects(self) -> bool:
        """Whether tokens may be rejected."""
        masks = self.weight is not None and self.weight.mode == "mask"
        parts = (self.rejection, self.veto, self.off_policy_mask, self.m2po)
        return masks or any(part is not None for part in parts)


PRESETS: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "tis": {"weight": {"level": "token", "mode": "truncate", "high": 2.0}},
    "seq_tis": {"weight": {"level": "sequence", "mode": "truncate", "high": 2.0}},
    "seq_mis": {"weight": {"level": "sequence", "mode": "mask", "low": 0.5, "high": 2.0}},
    "geo_rs": {"rejection": {"divergence": "k1", "reduction": "mean", "low": 0.999, "high": 1.001}},
    "icepop": {"weight": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0}},
    "trl": {"weight": {"level": "sequence", "mode": "mask", "high": 3.0}},
    "slime_mis": {"weight": {"level": "token", "mode": "truncate", "high": 2.0}, "veto": 1e-4},
}
"""Name -> the table it stands for; docs/OBJECTIVES.md has where each is from."""


def preset_of(correction: CorrectionConfig) -> str | None:
    """Return the name that ``correction`` could have been given as, None if it has none."""
    for name, table in PRESETS.items():
        if CorrectionConfig.model_validate(table) == correction:
            return name
    return None
