"""The rollout buffer: scored groups on their way to the learner, and the staleness bound.

`buffer` admits, holds and hands out; `order` says which groups make the next batch.
"""

from headrace.buffer.buffer import RolloutBuffer
from headrace.buffer.order import Ticket
from headrace.buffer.staleness import staleness_metrics, tokens_by_version

__all__ = ["RolloutBuffer", "Ticket", "staleness_metrics", "tokens_by_version"]
