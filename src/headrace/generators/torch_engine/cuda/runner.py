"""Execution on a CUDA device: decode passes by one kernel for attention, launched as graphs.

Owns the fact that nothing a graph has recorded ever moves: the cache is allocated whole, weights
are replaced where they lie. Prefilling is that of `ModelRunner`: its passes are few and large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace.generators.torch_engine.cuda.decode_graphs import MOST_ROWS, DecodeGraphs, Graph
from headrace.generators.torch_engine.cuda.table_attention import (
    DecodeInputs,
    PagedDecode,
    TableAttention,
    inputs_of,
)
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.weight_set import prove
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import content

_LOG = logging.getLogger(__name__)


class CudaRunner(ModelRunner):
    """A `ModelRunner` that decodes by `PagedDecode`, and by graphs where it can make them."""

    def __init__(
        self,
        config: DecoderConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_blocks: int,
        max_rows: int,
        mix: PagedDecode,
        make_graph: Callable[[], Graph] | None,
        is_quantized: bool = False,
    ) -> None:
        """``num_blocks``: all that the cache will ever have, one for scratch beside them.

        ``max_rows``: rollouts that run at once, at most. ``make_graph``: None launches kernel by
        kernel.
        """
        super().__init__(config, block_size, dtype, device, is_quantized=is_quantized)
        self._num_blocks, self._mix = num_blocks, mix
        self._copies: dict[str, Tensor] = {}
        self._published = 0
        """Their checksum."""
        self._cache.ensure(num_blocks + 1, num_blocks + 1)
        self._graphs: DecodeGraphs | None = None
        if make_graph is not None:
            longest = -(-config.max_positions // block_size)
            self._graphs = DecodeGraphs(
                self._forward,
                make_graph,
                max_rows=min(max_rows, MOST_ROWS),
                max_blocks=min(longest, num_blocks),
                scratch=num_blocks,
                device=device,
            )

    def stage(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """See `Runner`: a copy on the device, as it was published."""
        self._copies = {name: t.to(self._device, copy=True) for name, t in tensors.items()}
        self._published = published
        contents = {name: content(copy) for name, copy in self._copies.items()}
        prove(contents, self._copies, tensors, published)

    def swap(self) -> None:
        """See `Runner`: copied over from within the device, for graphs have recorded addresses."""
        self.load(self._copies)
        self.verify(self._copies, self._published)
        self._copies = {}

    def reserve(self, num_blocks: int, at_most: int) -> None:
        """See `ModelRunner`: all the memory there is has been there from the start."""
        assert num_blocks <= at_most == self._num_blocks, "the cache was made for other blocks"

    def clear_cache(self) -> None:
        """See `ModelRunner`: blocks stay where they are, emptied."""
        self.wipe_blocks(range(self._num_blocks + 1))

    def decode(self, running: RunningRollouts) -> Tensor:
        """See `ModelRunner`."""
        numbers = torch.stack((running.last_token, running.cached_length, running.next_block))
        if self._graphs is not None and len(running) <= self._graphs.max_rows:
            return self._next_logits(self._graphs(numbers, running.blocks, running.layout))
        return self._next_logits(self._forward(inputs_of(numbers, running.blocks, self._device)))

    def _forward(self, inputs: DecodeInputs) -> Tensor:
        """Return final hidden states [n, hidden]."""
        ids, positions, _ = inputs.numbers
        attention = TableAttention(self._cache, self.config, inputs, self._mix)
        hidden: Tensor = self._decoder(ids, positions, attention, self._products)
        return hidden


def find_paged_decode() -> PagedDecode | None:
    """Return the kernel, or None where triton is missing; says so."""
    try:
        from headrace.generators.torch_engine.cuda.decode_kernel import (  # noqa: PLC0415 - lazy
            paged_decode,
        )
    except ImportError as error:
        _LOG.warning(
            "%s: decoding goes on without captured graphs and the attention kernel, slower; "
            "install triton, which torch's own packages for CUDA bring along",
            error,
        )
        return None
    return paged_decode
