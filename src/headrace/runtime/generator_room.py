"""Memory of this machine for generators in processes of their own.

Owns: more of them than there can be are refused before anything is started. Says nothing of what
their caches take, which depends on rollouts. Growing a run asks the same of its pool.
"""

from __future__ import annotations

import math

from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.host import memory_shortage
from headrace.models.decoder_config import DecoderConfig
from headrace.runtime.devices import engine_device
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedModel

PROCESS_BYTES = 200 * 2**20
"""Of a process that holds no weights yet: 280 MiB were seen, and less is no reason to refuse."""


def require_room(config: RunConfig, model: PreparedModel) -> None:
    """Raise ConfigError where the generators of a run do not fit into memory that is free."""
    if config.placement.is_disaggregated:
        number, each = config.placement.num_generators, bytes_of_each(config, model)
        if problem := memory_shortage(number, each):
            msg = f"placement.num_generators = {number}: {problem}"
            raise ConfigError(msg)


def bytes_of_each(config: RunConfig, model: PreparedModel) -> int:
    """Return what a generator takes of this machine's memory at least: itself and its weights."""
    device, decoder = engine_device(config), model.decoder_config
    if device.type != "cpu" or not isinstance(decoder, DecoderConfig):
        return PROCESS_BYTES
    dtype = config.generator.dtype
    itemsize = 1 if dtype == "int8" else resolve_dtype(dtype, device).itemsize
    return PROCESS_BYTES + itemsize * sum(map(math.prod, decoder.tensor_shapes().values()))
