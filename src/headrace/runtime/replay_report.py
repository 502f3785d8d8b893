"""What came of a replay: whether every bit agrees, what differs first, and by how much."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that came out otherwise."""

    step: int
    name: str
    """Of a metric, or what else was compared."""
    recorded: float | int | str | None
    """None: it was not there."""
    recomputed: float | int | str | None

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.name}: {self.recorded!r} on record, "
            f"{self.recomputed!r} recomputed"
        )

    @property
    def relative(self) -> float | None:
        """Of two metrics, over the larger magnitude; None where they cannot be compared so."""
        if not isinstance(self.recorded, float) or not isinstance(self.recomputed, float):
            return None
        if not math.isfinite(self.recorded) or not math.isfinite(self.recomputed):
            return None
        largest = max(abs(self.recorded), abs(self.recomputed))
        return abs(self.recorded - self.recomputed) / largest if largest else 0.0

    def to_json(self) -> dict[str, object]:
        """Return it as strict JSON can hold it: what is not finite as text."""
        return {
            "step": self.step,
            "name": self.name,
            "recorded": _json(self.recorded),
            "recomputed": _json(self.recomputed),
        }


@dataclass(slots=True, kw_only=True)
class SamplingReport:
    """What came of sampling the groups of a step again."""

    num_groups: int
    """In the batch. Those with tokens of several versions are not sampled again."""
    is_promised: bool
    """Whether the recipe promises every bit, whatever is sampled together."""
    num_sampled: int = 0
    """Groups that were sampled again."""
    num_rollouts: int = 0
    """In those."""
    num_other_tokens: int = 0
    """Rollouts whose tokens came out otherwise."""
    num_other_logprobs: int = 0
    """Rollouts with the same tokens and a log-prob that differs in some bit."""
    largest_gap: float = 0.0
    """Between two log-probs of those, in nats."""

    def __str__(self) -> str:
        same = self.num_rollouts - self.num_other_tokens
        text = (
            f"sampled again: {self.num_sampled} of {self.num_groups} groups; of "
            f"{self.num_rollouts} rollouts {same} have the same tokens and "
            f"{same - self.num_other_logprobs} the same log-probs to the last bit"
        )
        if self.num_other_logprobs:
            text += f" (largest gap {self.largest_gap:.3g} nats)"
        if not self.is_promised and self.num_other_tokens + self.num_other_logprobs:
            text += (
                "; what is sampled together decides last bits, unless the run has "
                "generator.batch_invariant = true"
            )
        return text


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What came of it."""

    step: int
    """The step that was asked for."""
    first_step: int
    """The first that was made again."""
    started_from: str
    """The checkpoint's name, or the model's directory."""
    notes: list[str]
    """In what this machine is another one than the steps were recorded on."""
    differences: list[Difference] = field(default_factory=list)
    """Of every step that was made, in the order in which they were found."""
    sampling: SamplingReport | None = None
    """None: not asked for."""

    @property
    def is_identical(self) -> bool:
        """Whether no bit differs of what was compared."""
        return not self.differences

    @property
    def largest_relative(self) -> float:
        """The largest relative difference of a metric in the step that was asked for."""
        relative = [d.relative for d in self.differences if d.step == self.step]
        return max((value for value in relative if value is not None), default=0.0)

    def lines(self) -> list[str]:
        """Return it for people, the verdict first."""
        made = f"step {self.step}" if self.step == self.first_step else self._range()
        sampled = [] if self.sampling is None else [str(self.sampling)]
        if self.is_identical:
            return [f"{made} from {self.started_from}: bit-identical", *sampled]
        more = len(self.differences) - 1
        largest = f"{self.largest_relative:.3g}"
        return [
            f"{made} from {self.started_from}: NOT bit-identical",
            f"first difference: {self.differences[0]}" + f" (and {more} more)" * (more > 0),
            f"largest relative difference of a metric of step {self.step}: {largest}",
            *sampled,
            *(f"note: {note}; bits may differ for that alone" for note in self.notes),
        ]

    def _range(self) -> str:
        return f"steps {self.first_step} to {self.step}"

    def to_json(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "step": self.step,
            "is_identical": self.is_identical,
            "first_step": self.first_step,
            "started_from": self.started_from,
            "first_difference": self.differences[0].to_json() if self.differences else None,
            "num_differences": len(self.differences),
            "largest_relative_difference": self.largest_relative,
            "notes": self.notes,
            "sampling": None if self.sampling is None else asdict(self.sampling),
        }


def _json(value: float | str | None) -> float | str | None:
    is_strange = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_strange else value
