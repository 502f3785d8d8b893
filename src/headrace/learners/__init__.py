"""Learners: the roles that update the policy."""

from headrace.learners.checkpoint_store import CheckpointStore, StoredCheckpoint
from headrace.learners.learner import PolicySource, TorchLearner

__all__ = ["CheckpointStore", "PolicySource", "StoredCheckpoint", "TorchLearner"]
