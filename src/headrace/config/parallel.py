"""`[learner.parallel]`: a learner of several ranks, each a process of its own."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class ParallelConfig(Section):
    """How the policy lies on ranks, and how the work is divided.

    A single rank computes in the run's own process, unless ``own_process`` says otherwise.
    """

    replicas: int = Field(default=1, ge=1)
    """Copies of the whole policy that share the rollouts of a step."""
    shards: int = Field(default=1, ge=1)
    """Parts that each copy is cut into; every part computes rollouts of its own, and gathers a
    layer's weights while it needs them."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that compute the same rollouts together, each with a part of every matrix; must divide
    the model's heads, its key heads and its intermediate size."""
    own_process: bool = False
    """Give a single rank a process of its own as well: when that dies, the run goes on from the
    last checkpoint, and nothing else has to be started again."""
    timeout_seconds: float = Field(default=1800.0, gt=0.0)
    """A rank that does not answer for so long has hung: all are stopped and started again, as
    ``faults.max_learner_restarts`` says."""

    @property
    def num_ranks(self) -> int:
        """Processes of the learner."""
        return self.replicas * self.shards * self.tensor

    @property
    def has_processes(self) -> bool:
        """Whether ranks are processes of their own; else the learner computes in the run's."""
        return self.num_ranks > 1 or self.own_process

    @property
    def num_data_ranks(self) -> int:
        """Parts that the rollouts of a step are divided into."""
        return self.replicas * self.shards
