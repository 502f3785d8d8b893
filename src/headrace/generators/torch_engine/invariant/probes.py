"""Which shapes of products agree on this machine, asked by doing them.

A product rounds in an order that its kernel chooses. The probes show that order as nothing else
does: their rows are made so that every sum is exactly zero, term cancelling far-off term, and what
comes out is the rounding alone. Two orders then differ in nearly every element, in bfloat16 too,
which would round the difference of ordinary rows away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from headrace.errors import GeneratorFailure
from headrace.generators.torch_engine.invariant.attention import mix, score
from headrace.generators.torch_engine.invariant.sizes import (
    MOST,
    Compute,
    agreeing_sizes,
    reference_of,
)
from headrace.generators.torch_engine.products import FusedProducts
from headrace.models.decoder import Decoder, Products, RMSNorm
from headrace.models.decoder_config import DecoderConfig

BIAS = 1e-6
"""About as large as the rounding that it is added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes that agree; numbers ascend."""

    num_rows: tuple[int, ...]
    """Of a forward pass."""
    num_pairs: tuple[int, ...]
    """Of products of a tile of queries with the keys of one cache block."""
    num_queries: int
    """Of the smallest tile, in which a query that is alone meets its keys."""


@torch.inference_mode()
def find_shapes(
    config: DecoderConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    is_quantized: bool = False,
) -> Shapes:
    """Try all shapes. Raises GeneratorFailure where rows depend on each other in every one."""
    noise = _Noise(dtype, device)
    one_layer = replace(config, num_layers=1, windows=(None,))
    row_wise = (*_products(one_layer, noise, is_quantized=is_quantized), *_norms(config, device))
    num_rows = _agreeing(row_wise, [reference_of(compute) for compute in row_wise])
    num_queries, num_pairs = _attention_shapes(config, block_size, noise)
    if not num_rows or not num_pairs:
        msg = (
            f"generator.batch_invariant = true: products of {dtype} on this machine depend on the "
            "other rows in every shape tried; set it to false or try another generator.dtype"
        )
        raise GeneratorFailure(msg)
    return Shapes(
        num_rows=tuple(sorted(num_rows)),
        num_pairs=tuple(sorted(num_pairs)),
        num_queries=num_queries,
    )


def _agreeing(computes: Sequence[Compute], references: Sequence[Tensor]) -> frozenset[int]:
    """Return the sizes in which all ``computes`` agree with their ``references``."""
    return frozenset.intersection(
        *(agreeing_sizes(c, reference) for c, reference in zip(computes, references, strict=True))
    )


class _Noise:
    """Rows and columns whose products are zero but for rounding."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._random = torch.Generator().manual_seed(0)

    def factors(
        self, inner: int, left: Sequence[int], right: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return [*left, inner] and [*right, inner], whose sums of products over inner cancel."""
        places = torch.randperm(inner, generator=self._random)
        first, second = places[: inner // 2], places[inner // 2 : inner // 2 * 2]
        found = []
        for shape, sign in ((left, -1.0), (right, 1.0)):
            terms = self.normal(*shape, inner // 2)
            factor = torch.zeros(*shape, inner, dtype=self.dtype, device=self.device)
            factor[..., first], factor[..., second] = terms, sign * terms
            found.append(factor)
        return found[0], found[1]

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers."""
        return torch.randn(shape, generator=self._random).to(self.device, self.dtype)


def _products(config: DecoderConfig, noise: _Noise, *, is_quantized: bool) -> Iterator[Compute]:
    """Yield every product of one layer and of the output."""
    with torch.device("meta"):
        decoder = Decoder(config).to(noise.dtype)
    names = {module: name for name, module in decoder.named_modules()}
    products = FusedProducts(decoder, noise.dtype, noise.device, is_quantized=is_quantized)
    tensors: dict[str, Tensor] = {}
    inputs: dict[tuple[nn.Linear, ...], Tensor] = {}
    for linears in decoder.linears():
        features = [linear.out_features for linear in linears]
        inputs[linears], weight = noise.factors(linears[0].in_features, [MOST], [sum(features)])
        for linear, part in zip(linears, torch.split(weight, features), strict=True):
            tensors[f"{names[linear]}.weight"] = part
            if linear.bias is not None:
                tensors[f"{names[linear]}.bias"] = BIAS * noise.normal(linear.out_features)
    hidden, tensors[decoder.output_name] = noise.factors(
        config.hidden_size, [MOST], [config.vocab_size]
    )
    products.load(tensors)
    for linears, rows in inputs.items():
        yield partial(_multiplied, products, linears, rows)
    yield lambda picked: products.logits(hidden[picked])


def _multiplied(
    products: Products, linears: tuple[nn.Linear, ...], rows: Tensor, picked: Tensor
) -> Tensor:
    return torch.cat(list(products(rows[picked], linears)), -1)


def _norms(config: DecoderConfig, device: torch.device) -> Iterator[Compute]:
    """Yield the kinds of norm. In float32, in which all of them take the mean square."""
    noise = _Noise(torch.float32, device)
    heads = (config.num_heads, config.num_kv_heads) if config.qk_norm else ()
    for shape in ((config.hidden_size,), *((count, config.head_dim) for count in heads)):
        norm = RMSNorm(shape[-1], config.rms_norm_eps).to(device)
        yield partial(_normed, norm, noise.normal(MOST, *shape))


def _normed(norm: RMSNorm, rows: Tensor, picked: Tensor) -> Tensor:
    return norm.forward(rows[picked])


def _attention_shapes(
    config: DecoderConfig, block_size: int, noise: _Noise
) -> tuple[int, frozenset[int]]:
    """Return the queries of the smallest tile that agrees with a full one, and numbers of pairs."""
    tiles = _AttentionTiles(config, block_size, noise)
    references = [reference_of(compute) for compute in tiles.products(block_size, 0)]
    of_full = [_agreeing(tiles.products(block_size, at), references) for at in range(block_size)]
    agreeing = frozenset.intersection(*of_full)
    for num_queries in (2**power for power in range(block_size.bit_length() - 1)):
        few = agreeing & _agreeing(tiles.products(num_queries, 0), references)
        if few:
            return num_queries, few
    return block_size, agreeing


class _AttentionTiles:
    """The two products of attention, of one query of a tile with one cache block."""

    def __init__(self, config: DecoderConfig, block_size: int, noise: _Noise) -> None:
        self._noise, self._repeats = noise, config.num_heads // config.num_kv_heads
        pair = (MOST, config.num_kv_heads)
        one, width = (*pair, self._repeats), config.head_dim
        self._query, self._keys = noise.factors(width, one, (*pair, block_size))
        self._weights, values = noise.factors(block_size, one, (*pair, width))
        self._values = values.transpose(-1, -2).contiguous()

    def products(self, num_queries: int, at: int) -> tuple[Compute, Compute]:
        """Return scores and mixing, with the query in place ``at`` among ``num_queries``."""
        own = slice(at * self._repeats, (at + 1) * self._repeats)

        def tiles_of(rows: Tensor) -> Tensor:
            shape = (*rows.shape[:2], num_queries * self._repeats, rows.shape[-1])
            # A query that is alone has zeros beside it, one of a full tile has others.
            tiles = self._noise.normal(*shape) if at else rows.new_zeros(shape)
            tiles[:, :, own] = rows
            return tiles

        queries, weights = tiles_of(self._query), tiles_of(self._weights)
        return (
            lambda picked: score(queries[picked], self._keys[picked])[:, :, own],
            lambda picked: mix(weights[picked], self._values[picked])[:, :, own],
        )
