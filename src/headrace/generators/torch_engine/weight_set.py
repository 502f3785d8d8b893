"""One copy of the weights as passes read them: modules for what is small, products for matrices.

Owns the fact that a set is loaded whole and read back before anybody computes with it. A runner may
have two of them, of which passes read one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.products import FusedProducts
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import misfits, same_bits

TURNS = 16
"""Weight updates over which every large weight is read back once: that costs as much as loading."""
LARGE = 1 << 18
"""Numbers of a weight that is read back in turn only."""


class WeightSet:
    """A decoder that holds nothing until the first `load`."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_quantized: bool = False,
    ) -> None:
        """``is_quantized``: multiply by matrices in eight bits, with all the rest in ``dtype``."""
        self._device = device
        with torch.device("meta"):
            decoder = Decoder(config).to(dtype)
        self.decoder = decoder.requires_grad_(requires_grad=False)
        # What the weights must look like; most of them are never stored under these names.
        self._expected = dict(decoder.named_parameters())
        self.products = FusedProducts(decoder, dtype, device, is_quantized=is_quantized)
        for name in self._expected.keys() - self.products.names:
            self._allocate(name)
        self._turn = 0
        """Of the weights that are held: the loads that went well, one after another, before."""
        self._num_verified = 0

    def _allocate(self, name: str) -> None:
        """Give a parameter memory, not content: the generator samples after the first weights."""
        module, _, leaf = name.rpartition(".")
        empty = torch.empty_like(self._expected[name], device=self._device)
        parameter = nn.Parameter(empty, requires_grad=False)
        setattr(self.decoder.get_submodule(module), leaf, parameter)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise WeightSyncError when a name, a shape or a dtype of ``tensors`` does not fit.

        A cast would leave weights that nobody published.
        """
        if wrong := misfits(self._expected, tensors):
            raise WeightSyncError(wrong)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace every weight by the one of the same name in ``tensors``, which fit."""
        # Until `verify` has seen them, these weights are as unknown as the first ones.
        self._turn, self._num_verified = self._num_verified, 0
        self.products.load(tensors)
        for name, weight in self._own_weights():
            weight.copy_(tensors[name])

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Read weights back and raise WeightSyncError when one is not as ``tensors`` has it.

        All of them the first time, and after a load that failed; else every small one, and of the
        products and the other large ones one in `TURNS`, in turn.
        """
        turns = TURNS if self._turn else 1
        own = (
            name
            for number, (name, weight) in enumerate(self._own_weights())
            if (weight.numel() < LARGE or number % turns == self._turn % turns)
            and not same_bits(weight, tensors[name])
        )
        products = self.products.differing(tensors, turn=self._turn, turns=turns)
        if wrong := list(chain(own, products)):
            msg = f"{wrong[0]} is not held as it was published"
            raise WeightSyncError(msg)
        self._num_verified = self._turn + 1

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.decoder.named_parameters():
            if not weight.is_meta:
                yield name, weight
