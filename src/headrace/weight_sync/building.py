"""Which store and reader serve a recipe's `[weight_sync]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

from headrace.compute import ComputeThread
from headrace.config import WeightSyncConfig
from headrace.errors import ConfigError
from headrace.roles import WeightReader, WeightRoom, WeightStore
from headrace.weight_sync.blocks import Carrier, Fetcher
from headrace.weight_sync.broadcast import BroadcastCarrier
from headrace.weight_sync.broadcast_reader import BroadcastReader
from headrace.weight_sync.chained import ChainedReader, ChainedStore
from headrace.weight_sync.files import FileCarrier, FileFetcher
from headrace.weight_sync.network import NetworkCarrier, NetworkFetcher
from headrace.weight_sync.shared_memory import (
    DIRECTORY,
    SharedMemoryCarrier,
    SharedMemoryFetcher,
)
from headrace.weight_sync.store import RoomStore, WholeReader, WholeStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChannel:
    """The two ends of a weight sync between processes."""

    store: WeightStore
    """Stays with the learner, and is closed by whoever had this made."""
    room: WeightRoom | None = None
    """The store's memory, for a learner to compute in what it publishes; None: it has none."""
    reader: WeightReader
    """Goes to each generator's process, pickled."""


def build_weight_channel(config: WeightSyncConfig, compute: ComputeThread | None) -> WeightChannel:
    """Return both ends for generators in other processes.

    ``compute``: where the learner computes, which copies the weights. Raises ConfigError.
    """
    if config.transport == "broadcast":
        return _broadcasting(config, compute)
    carrier, fetcher = _carried(config)
    if config.delta is not None:
        return WeightChannel(
            store=ChainedStore(carrier, whole_every=config.delta.whole_every, compute=compute),
            reader=ChainedReader(fetcher),
        )
    reader = WholeReader(fetcher)
    if isinstance(carrier, SharedMemoryCarrier):
        store = RoomStore(carrier, compute)
        return WeightChannel(store=store, room=store, reader=reader)
    return WeightChannel(store=WholeStore(carrier, compute), reader=reader)


def _carried(config: WeightSyncConfig) -> tuple[Carrier, Fetcher]:
    match config.transport:
        case "auto" | "shared_memory":
            memory = config.directory or DIRECTORY
            carrier = SharedMemoryCarrier(directory=memory, lock_seconds=config.deadline_seconds)
            return carrier, SharedMemoryFetcher()
        case "files":
            assert config.directory is not None, "it is refused without one"
            fetcher = FileFetcher(patience_seconds=config.deadline_seconds)
            return FileCarrier(directory=config.directory), fetcher
        case "network":
            return _listening(config), NetworkFetcher(seconds=config.deadline_seconds)
        case "broadcast":
            raise AssertionError(config.transport)  # it has no fetcher: nobody reads it alone
        case "memory":
            msg = (
                'weight_sync.transport = "memory": weights by reference stay in one process, and '
                'generators have their own; use "auto" or "shared_memory"'
            )
            raise ConfigError(msg)
        case _:
            assert_never(config.transport)


def _broadcasting(config: WeightSyncConfig, compute: ComputeThread | None) -> WeightChannel:
    with _at_host(config):
        carrier = BroadcastCarrier(
            config.host, bucket_bytes=config.bucket_mib << 20, seconds=config.deadline_seconds
        )
    store = RoomStore(carrier, compute)
    reader = BroadcastReader(seconds=config.deadline_seconds)
    return WeightChannel(store=store, room=store, reader=reader)


def _listening(config: WeightSyncConfig) -> NetworkCarrier:
    with _at_host(config):
        return NetworkCarrier(config.host, fan_out=config.fan_out, seconds=config.deadline_seconds)


@contextmanager
def _at_host(config: WeightSyncConfig) -> Iterator[None]:
    """Raise ConfigError where nobody can listen there."""
    try:
        yield
    except OSError as error:
        msg = (
            f'weight_sync.host = "{config.host}": cannot listen there ({error}); give an address '
            "of this machine"
        )
        raise ConfigError(msg) from error
