"""`[faults]`: how much of what dies is started again before the run gives up."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class FaultConfig(Section):
    """What a run outlives by itself."""

    max_learner_restarts: int = Field(default=3, ge=0)
    """How many times in a row, without a new checkpoint between, a learner that died or hung is
    started again from the last checkpoint; needs a learner in processes of its own."""
    backoff_seconds: float = Field(default=1.0, ge=0.0)
    """Before the first of these restarts; twice as long before each further one, at most 60."""
    learner_deadline_seconds: float = Field(default=1800.0, gt=0.0)
    """For a step of a learner in the controller's own process, a copy of its weights or a
    checkpoint: then the run ends with an error, since nothing can end a thread. A learner in
    processes of its own has ``learner.parallel.timeout_seconds`` instead, and is started again."""
    verifier_deadline_seconds: float = Field(default=1800.0, gt=0.0)
    """For the verdicts of one group, waiting in line included: then it is dropped without verdicts.
    It lies behind the deadlines that the components of a verifier have themselves."""
