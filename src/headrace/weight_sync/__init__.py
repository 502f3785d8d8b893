"""WeightSync: how the learner's weights reach the generators."""

from headrace.weight_sync.building import WeightChannel, build_weight_channel
from headrace.weight_sync.memory import MemoryRoom, MemoryWeightSync
from headrace.weight_sync.stored import StoredWeightSync

__all__ = [
    "MemoryRoom",
    "MemoryWeightSync",
    "StoredWeightSync",
    "WeightChannel",
    "build_weight_channel",
]
