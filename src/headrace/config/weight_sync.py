"""`[weight_sync]`: how new weights get from the learner to the generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field

from headrace.config.section import Section

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal

Transport: TypeAlias = Literal["auto", "memory", "shared_memory", "files", "network", "broadcast"]
"""What brings weights from process to process."""


class DeltaConfig(Section):
    """Publishing what changed, bit for bit, instead of all weights."""

    whole_every: int = Field(default=50, ge=2)
    """Publications from one whole version to the next. A generator that starts reads the last whole
    one and every change since."""


class WeightSyncConfig(Section):
    """What carries weights; docs/WEIGHT_SYNC.md says what each way costs."""

    transport: Transport = "auto"
    """``memory``: by reference, to a generator in the learner's own process; ``shared_memory``: to
    processes of this machine, which read them where they lie; ``files``: to machines that see
    ``directory``; ``network``: to machines that reach ``host``, and from one to the next;
    ``broadcast``: to all generators at once, which reach ``host``, by torch.distributed.
    ``auto``: the first of these that reaches without a directory."""
    directory: Path | None = None
    """With ``files`` an absolute path that every machine sees under this name; with
    ``shared_memory`` a directory of memory of this machine, of which null is ``/dev/shm``."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """With ``network`` and ``broadcast`` this machine's address, where generators of others reach
    it. What is sent is not encrypted: use a network that is trusted."""
    fan_out: int = Field(default=2, ge=1)
    """With ``network`` transfers from one holder of the weights at a time."""
    bucket_mib: int = Field(default=64, ge=1, le=4096)
    """With ``broadcast`` the MiB that are sent at a time."""
    delta: DeltaConfig | None = None
    """Publish changes; null publishes all weights each time. Learner and generators then hold
    another copy of the weights each, which is worth it where bytes are dear."""
    deadline_seconds: float = Field(default=60.0, gt=0.0)
    """Longest wait for memory that a generator still reads old weights from, for a file to show on
    another machine, for any message over the network, and for any member of a broadcast."""


def weight_sync_refusals(config: WeightSyncConfig) -> Iterator[Refusal]:
    """Yield what contradicts itself."""
    transport = f'weight_sync.transport = "{config.transport}"'
    is_files, directory = config.transport == "files", config.directory
    if directory is not None and config.transport not in {"files", "shared_memory"}:
        text = (
            f"weight_sync.directory with {transport}: nothing is written there; remove it or set "
            'weight_sync.transport = "files", or "shared_memory" if it is one of memory'
        )
        yield ("weight_sync.directory", "weight_sync.transport"), text
    if is_files and (directory is None or not directory.is_absolute()):
        text = (
            f"weight_sync.directory with {transport}: give the absolute path of a directory that "
            "every machine sees under this name"
        )
        yield ("weight_sync.directory", "weight_sync.transport"), text
    yield from _unread(config)
    if config.delta is not None and config.transport == "broadcast":
        text = (
            f"weight_sync.delta with {transport}: a broadcast is of all weights, since who gets it "
            "at the same time need not hold the same; remove it or set weight_sync.transport = "
            '"network"'
        )
        yield ("weight_sync.delta", "weight_sync.transport"), text
    if config.delta is not None and config.transport == "memory":
        text = (
            f"weight_sync.delta with {transport}: nothing travels, so nothing is saved; remove it "
            'or set weight_sync.transport = "files" or "shared_memory"'
        )
        yield ("weight_sync.delta", "weight_sync.transport"), text


_READ_BY: Mapping[str, tuple[Transport, ...]] = {
    "host": ("network", "broadcast"),
    "fan_out": ("network",),
    "bucket_mib": ("broadcast",),
}
"""Settings, and the transports that have a use for them."""


def _unread(config: WeightSyncConfig) -> Iterator[Refusal]:
    """Yield what nobody would look at."""
    defaults = WeightSyncConfig()
    for key, readers in _READ_BY.items():
        if config.transport not in readers and getattr(config, key) != getattr(defaults, key):
            allowed = " or ".join(f'"{reader}"' for reader in readers)
            text = (
                f'weight_sync.{key} with weight_sync.transport = "{config.transport}": it is read '
                f"by another transport alone; remove it or set weight_sync.transport = {allowed}"
            )
            yield (f"weight_sync.{key}", "weight_sync.transport"), text
