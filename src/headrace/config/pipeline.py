"""`[pipeline]`: how much is under way at once, and what becomes of groups that take long."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section
from headrace.types import Late


class PipelineConfig(Section):
    """What is generated ahead of the learner; docs/STALENESS.md has the bounds and their proofs."""

    depth: int | None = Field(default=None, ge=1)
    """Batches under way at once, the one that is trained on included; null is as many as
    ``max_staleness`` allows. More of them keep the generator busy, fewer keep rollouts fresh."""
    late: Late = "wait"
    """What a batch does about groups that take longer than others. ``wait``: batches hold the
    groups in the order of their prompts. ``carry_over``: a later batch takes them, within
    ``max_staleness``. ``cancel``: they are given up, and their prompts recorded as dropped."""
    surplus_groups: int = Field(default=0, ge=0)
    """With ``cancel``: prompts drawn beyond ``groups_per_step``, as many as a batch may give up.
    What is given up is what takes long, so rewards that go with length are seen less often."""
