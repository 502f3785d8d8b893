"""Which runner serves a device and what is asked of it, and what none of them can do."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.errors import ConfigError
from headrace.generators.torch_engine.cpu.panels import can_hold_int8
from headrace.generators.torch_engine.cpu.runner import FusedRunner, can_run
from headrace.generators.torch_engine.cuda.decode_graphs import CudaGraph
from headrace.generators.torch_engine.cuda.runner import CudaRunner, find_paged_decode
from headrace.generators.torch_engine.foreign_runner import ForeignRunner
from headrace.generators.torch_engine.forms import can_multiply_int8
from headrace.generators.torch_engine.products import NO_INT8
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.runner_role import Runner
from headrace.kernels.vectors import LANES
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig


def choose_runner(
    config: DecoderConfig | ForeignConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int,
    max_rows: int,
    is_quantized: bool,
    batch_invariant: bool,
) -> Runner:
    """Return one for a cache of ``num_blocks`` and ``max_rows`` rollouts at once, at most.

    Raises ConfigError with `refusals`.
    """
    asked = {"is_quantized": is_quantized, "batch_invariant": batch_invariant}
    if problems := list(refusals(config, block_size, dtype, device, **asked)):
        raise ConfigError(*problems)
    if isinstance(config, ForeignConfig):
        return ForeignRunner(config, dtype, device)
    if can_run(config, block_size, dtype, device):
        return FusedRunner(config, block_size, dtype, device, is_quantized=is_quantized)
    mix = find_paged_decode() if device.type == "cuda" else None
    if mix is None:
        return ModelRunner(config, block_size, dtype, device, is_quantized=is_quantized)
    return CudaRunner(
        config,
        block_size,
        dtype,
        device,
        num_blocks=num_blocks,
        max_rows=max_rows,
        mix=mix,
        make_graph=CudaGraph.maker(),
        is_quantized=is_quantized,
    )


def refusals(
    config: DecoderConfig | ForeignConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_quantized: bool,
    batch_invariant: bool,
) -> Iterator[str]:
    """Say what is asked for and not to be had on ``device`` for such a model."""
    if isinstance(config, ForeignConfig):
        yield from _foreign_refusals(
            config, is_quantized=is_quantized, batch_invariant=batch_invariant
        )
        return
    if is_quantized and not (can_hold_int8(dtype, device, LANES) or can_multiply_int8(device)):
        yield NO_INT8
    if batch_invariant and not can_run(config, block_size, dtype, device):
        yield (
            "generator.batch_invariant = true: only the kernels for processors keep this promise, "
            "for float32, bfloat16, float16 and int8, and for models whose hidden_size and "
            "intermediate_size are multiples of 16 and head_dim of 32; this is "
            f"{str(dtype).removeprefix('torch.')} on {device.type} with {config.hidden_size}, "
            f"{config.intermediate_size} and {config.head_dim}. Set it to false"
        )


def _foreign_refusals(
    config: ForeignConfig, *, is_quantized: bool, batch_invariant: bool
) -> Iterator[str]:
    asked = {
        'generator.dtype = "int8"': is_quantized,
        "generator.batch_invariant = true": batch_invariant,
    }
    for setting, is_asked in asked.items():
        if is_asked:
            yield (
                f"{setting}: {config.family} is sampled through transformers, which does not do "
                "this; leave it out"
            )
