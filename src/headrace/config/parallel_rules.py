"""Which settings of a learner cannot be meant together with several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config.learner import LearnerConfig

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal


def parallel_refusals(learner: LearnerConfig) -> Iterator[Refusal]:
    """Yield what contradicts itself."""
    count = learner.parallel.num_ranks
    if count > 1 and learner.lora is not None:
        text = (
            f"learner.lora with learner.parallel of {count} ranks: an adapter is trained by one "
            "process alone; remove learner.parallel, or train all weights"
        )
        yield ("learner.lora", "learner.parallel"), text
