"""`[weight_sync]`: how new weights get from the learner to the generators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from headrace.config.section import Section

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal

Transport: TypeAlias = Literal["auto", "memory", "shared_memory"]
"""What brings weights from process to process."""


class WeightSyncConfig(Section):
    """What carries weights; docs/WEIGHT_SYNC.md says what each way costs."""

    transport: Transport = "auto"
    """``memory``: by reference, to a generator in the learner's own process; ``shared_memory``: to
    processes of this machine, which read them where they lie. ``auto``: the first that reaches."""
    directory: Path | None = None
    """With ``shared_memory`` a directory of memory of this machine; null is ``/dev/shm``."""
    deadline_seconds: float = Field(default=60.0, gt=0.0)
    """Longest wait for memory that a generator still reads old weights from."""


def weight_sync_refusals(config: WeightSyncConfig) -> Iterator[Refusal]:
    """Yield what contradicts itself."""
    if config.directory is not None and config.transport in {"auto", "memory"}:
        text = (
            f'weight_sync.directory with weight_sync.transport = "{config.transport}": nothing '
            'is written there; remove it or set weight_sync.transport = "shared_memory"'
        )
        yield ("weight_sync.directory", "weight_sync.transport"), text
