"""Which runner serves a device and what is asked of it."""

from __future__ import annotations

import torch

from headrace.generators.torch_engine.cuda.decode_graphs import CudaGraph
from headrace.generators.torch_engine.cuda.runner import CudaRunner, find_paged_decode
from headrace.generators.torch_engine.invariant.runner import InvariantRunner
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.models.decoder_config import DecoderConfig


def choose_runner(
    config: DecoderConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_blocks: int,
    max_rows: int,
    is_quantized: bool,
    batch_invariant: bool,
) -> ModelRunner:
    """Return one for a cache of ``num_blocks`` and ``max_rows`` rollouts at once, at most."""
    if batch_invariant:
        return InvariantRunner(config, block_size, dtype, device, is_quantized=is_quantized)
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
