"""`[checkpoint]` and `[monitors]`: what a run leaves behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import Section


class CheckpointConfig(Section):
    """When a checkpoint is written and how many are kept."""

    every: int = Field(default=50, ge=1)
    """Training steps between checkpoints; one is always written at the end and on Ctrl-C."""
    keep: int = Field(default=2, ge=1)
    """Older ones are deleted, after a newer one is durable."""


class MonitorConfig(Section):
    """What is shown and written."""

    console: bool = True
    """Show progress on standard error."""
    rollouts_every: int = Field(default=1, ge=0)
    """Write the rollouts of every so many steps to Parquet; 0 writes none."""
    record: Literal["auto", "steps", "none"] = "auto"
    """Keep what `headrace replay` needs: the rollouts of every step, and a line in records.jsonl.
    ``auto``: where ``max_staleness`` is above 0, since a synchronous run repeats by itself."""
