"""`[alarms]`: what makes one suspect that rewards are earned in another way than was meant."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class DriftConfig(Section):
    """The training reward rises while held-out quality falls: the reward is not what was meant."""

    window: int = Field(default=5, ge=3)
    """Evaluations that the trend is taken over, by least squares."""
    fall: float = Field(default=0.05, gt=0.0)
    """By how much held-out quality must have fallen over the window."""
    rise: float = Field(default=0.02, gt=0.0)
    """By how much the training reward must have risen over the window."""
    component: str | None = None
    """Component whose held-out mean is the quality, such as an exact one with weight 0 beside a
    judge; null takes pass@1."""


class AlarmConfig(Section):
    """What sounds an alarm, and what follows. Alarms are events: console, events.jsonl, report."""

    on_alarm: Literal["warn", "stop"] = "warn"
    """``warn`` goes on; ``stop`` ends the run with a checkpoint and exit status 1."""
    drift: DriftConfig | None = DriftConfig()
    """Alarm on rewards that part from quality; null never does."""
    max_label_share: float | None = Field(default=0.5, gt=0.0, le=1.0)
    """Alarm when more than this share of a step's passed rollouts carry one label, such as
    ``exits_early``; null never does."""
    num_canary_rollouts: int = Field(default=4, ge=1)
    """Rollouts of each prompt of ``data.canaries`` at every evaluation. One that passes sounds an
    alarm."""
