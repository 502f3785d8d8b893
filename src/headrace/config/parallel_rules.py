"""Which settings of a learner cannot be meant together with several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config.learner import LearnerConfig
from headrace.config.parallel import ParallelConfig

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal


def described(parallel: ParallelConfig) -> str:
    """Say what asks for ranks, as it stands in a message."""
    if parallel.num_ranks > 1:
        return f"learner.parallel of {parallel.num_ranks} ranks"
    return "learner.parallel.own_process = true"


def parallel_refusals(learner: LearnerConfig) -> Iterator[Refusal]:
    """Yield what contradicts itself."""
    if learner.parallel.has_processes and learner.lora is not None:
        text = (
            f"learner.lora with {described(learner.parallel)}: an adapter is trained in the run's "
            "own process alone; remove learner.parallel, or train all weights"
        )
        yield ("learner.lora", "learner.parallel"), text
