"""Execution in which a rollout's bits do not depend on what else runs.

The same passes as `ModelRunner`, cut into pieces of few numbers of rows and filled up to them. A
piece sees through the cache what the pieces before it computed, so it may end anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from headrace.generators.torch_engine.invariant.attention import TiledAttention, Tiles
from headrace.generators.torch_engine.invariant.probes import Shapes, find_shapes
from headrace.generators.torch_engine.invariant.sizes import cut
from headrace.generators.torch_engine.rollout_state import RunningRollouts
from headrace.generators.torch_engine.runner import ModelRunner, pack
from headrace.generators.torch_engine.scheduler import Part
from headrace.models.decoder_config import DecoderConfig


def elementwise_silu(gate: Tensor) -> Tensor:
    """Return silu(gate), whose bits depend on the element alone.

    torch's own takes another exponential for the last elements of a tensor than for those before,
    where vectors do not come out even.
    """
    wide = gate.float()
    return (wide / torch.neg(wide).exp_().add_(1.0)).to(gate.dtype)


class InvariantRunner(ModelRunner):
    """A `ModelRunner` whose logits for a token depend on the tokens before it and nothing else."""

    def __init__(
        self,
        config: DecoderConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        super().__init__(
            config,
            block_size,
            dtype,
            device,
            is_quantized=is_quantized,
            activation=elementwise_silu,
        )
        self._find_shapes = partial(
            find_shapes, config, block_size, dtype, device, is_quantized=is_quantized
        )
        self._known_shapes: Shapes | None = None

    @property
    def _shapes(self) -> Shapes:
        assert self._known_shapes is not None, "used before the first load"
        return self._known_shapes

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ModelRunner`. Raises GeneratorFailure where this machine cannot be invariant."""
        # Here, because the shapes that agree are those of the thread that runs the passes.
        self._known_shapes = self._known_shapes or self._find_shapes()
        super().load(tensors)

    def prefill(self, parts: Sequence[Part]) -> Tensor:
        """See `ModelRunner`."""
        packed = pack(parts)
        width = max(len(part.branch.blocks) for part in parts)
        blocks = [(*part.branch.blocks, *[0] * (width - len(part.branch.blocks))) for part in parts]
        tables, sequence = torch.tensor(blocks, device=self._device), self._tensor(packed.part)
        positions = self._tensor(packed.positions)

        def tiles(rows: slice) -> Tiles:
            return Tiles.joined(tables, sequence[rows], positions[rows], self._cache.block_size)

        hidden = self._forward(self._tensor(packed.ids), positions, tiles)
        return self._next_logits(hidden[self._tensor(packed.last)])

    def decode(self, running: RunningRollouts) -> Tensor:
        """See `ModelRunner`."""
        positions = running.cached_length.to(self._device)
        tables = running.blocks.to(self._device)

        def tiles(rows: slice) -> Tiles:
            return Tiles.single(tables[rows], positions[rows], self._shapes.num_queries)

        return self._next_logits(
            self._forward(running.last_token.to(self._device), positions, tiles)
        )

    def _forward(self, ids: Tensor, positions: Tensor, tiles: Callable[[slice], Tiles]) -> Tensor:
        """Return final hidden states [n, hidden] of ``ids`` [n]; ``tiles`` of any rows of them."""
        found = []
        for rows, size in cut(len(ids), self._shapes.num_rows):
            attention = TiledAttention(
                self._cache, self.config, tiles(rows), self._shapes.num_pairs
            )
            padding = (0, size - len(ids[rows]))
            hidden = self._decoder(
                functional.pad(ids[rows], padding),
                functional.pad(positions[rows], padding),
                attention,
                self._products,
            )
            found.append(hidden[: len(ids[rows])])
        return torch.cat(found)

    def _raw_logits(self, hidden: Tensor) -> Tensor:
        """See `ModelRunner`."""
        found = []
        for rows, size in cut(len(hidden), self._shapes.num_rows):
            filled = functional.pad(hidden[rows], (0, 0, 0, size - len(hidden[rows])))
            found.append(super()._raw_logits(filled)[: len(hidden[rows])])
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else hidden.new_empty(0, self.config.vocab_size)
