"""WeightSync: how the learner's weights reach the generators."""

from headrace.weight_sync.memory import MemoryWeightSync

__all__ = ["MemoryWeightSync"]
