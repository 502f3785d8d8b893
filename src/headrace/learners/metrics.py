"""What the learner counts while it computes, and the figures that come of it.

Owns: everything is a sum or a maximum over tokens and rollouts until `figures` divides once, so a
figure is the same for every split into micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.config import ObjectiveConfig
from headrace.objectives import mismatch
from headrace.objectives.importance import effective_sample_share


@dataclass(slots=True)
class LossSums:
    """Sums and maxima; divided once, at the end of the step."""

    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peaks: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __getitem__(self, name: str) -> float:
        return self.totals[name]

    def add(self, other: LossSums) -> None:
        """Add the sums of another micro-batch."""
        for name, value in other.totals.items():
            self.totals[name] += value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks[name], value)

    def count(self, **sums: Tensor) -> None:
        """Add scalars; all of them come to the host in one transfer."""
        values = torch.stack([value.detach().to(torch.float64) for value in sums.values()])
        for name, value in zip(sums, values.tolist(), strict=True):
            self.totals[name] += value

    def peak(self, **values: Tensor) -> None:
        """Remember the largest of each tensor; an empty one has none. One transfer too."""
        full = {name: value for name, value in values.items() if value.numel()}
        if not full:
            return
        largest = torch.stack([value.detach().max().to(torch.float64) for value in full.values()])
        for name, value in zip(full, largest.tolist(), strict=True):
            self.peaks[name] = max(self.peaks[name], value)


def loss_figures(sums: LossSums, objective: ObjectiveConfig) -> dict[str, float]:
    """Return the metrics of the tokens that were computed; none where there was no token."""
    seen = sums["mismatch/tokens"]
    if not seen:
        return {}
    own = {
        name.removeprefix("mismatch/"): value
        for name, value in sums.totals.items()
        if name.startswith("mismatch/")
    }
    found = {f"learner/mismatch/{name}": value for name, value in mismatch.figures(own).items()}
    found["learner/mismatch/max_gap"] = sums.peaks["gap"]
    if objective.correction.rejects:
        found["learner/rejection/token_share"] = 1.0 - sums["tokens"] / seen
        found["learner/rejection/rollout_share"] = (
            sums["rejected_rollouts"] / sums["mismatch/rollouts"]
        )
    if sums["reward_tokens"]:
        found["learner/kl/reference"] = sums["reward_kl"] / sums["reward_tokens"]
    if sums["tokens"]:
        found |= _kept_figures(sums, objective)
    return found


def _kept_figures(sums: LossSums, objective: ObjectiveConfig) -> dict[str, float]:
    tokens = sums["tokens"]
    found = {
        "learner/entropy/mean": sums["entropy"] / tokens,
        "learner/importance_ratio/mean": sums["ratio"] / tokens,
        "learner/importance_ratio/max": sums.peaks["ratio"],
        "learner/clip/share": sums["clipped"] / tokens,
    }
    if objective.correction.weight is not None:
        # As they were applied, so within their bounds.
        found |= {
            "learner/importance_weight/mean": sums["importance"] / tokens,
            "learner/importance_weight/max": sums.peaks["importance"],
            "learner/importance_weight/truncated_share": sums["altered"] / sums["mismatch/tokens"],
            "learner/importance_weight/ess": effective_sample_share(
                sums["importance"], sums["squared_importance"], tokens
            ),
        }
    if objective.kl_in_loss:
        found["learner/kl/reference"] = sums["reference_kl"] / tokens
    return found
