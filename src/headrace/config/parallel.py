"""`[learner.parallel]`: a learner of several ranks, each a process of its own."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class ParallelConfig(Section):
    """How the policy lies on ranks, and how the work is divided. One rank is one process alone."""

    replicas: int = Field(default=1, ge=1)
    """Copies of the whole policy that share the rollouts of a step."""
    shards: int = Field(default=1, ge=1)
    """Parts that each copy is cut into; every part computes rollouts of its own, and gathers a
    layer's weights while it needs them."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that compute the same rollouts together, each with a part of every matrix; must divide
    the model's heads, its key heads and its intermediate size."""
    timeout_seconds: float = Field(default=1800.0, gt=0.0)
    """A rank that does not answer for so long has hung, and ends the run."""

    @property
    def num_ranks(self) -> int:
        """Processes of the learner."""
        return self.replicas * self.shards * self.tensor

    @property
    def num_data_ranks(self) -> int:
        """Parts that the rollouts of a step are divided into."""
        return self.replicas * self.shards
