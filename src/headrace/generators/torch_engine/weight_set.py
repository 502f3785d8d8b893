"""One copy of the weights as passes read them: modules for what is small, products for matrices.

Owns the fact that a set is loaded whole and read back before anybody computes with it. A runner may
have two of them, of which passes read one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headrace.errors import WeightSyncError
from headrace.generators.torch_engine.products import FusedProducts
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import checksum_of, content, misfits

TURNS = 16
"""Updates over which every rounded matrix is compared once: it costs as much as loading."""


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

    def verify(self, tensors: Mapping[str, Tensor], published: int) -> None:
        """Read every weight back; raise WeightSyncError unless ``published`` is their checksum.

        Of matrices that are held in fewer bits than ``tensors`` have, which were loaded, the
        checksum is that of ``tensors``, and what is held is compared with it: all of it the first
        time and after a load that failed, else one product in `TURNS`, in turn.
        """
        prove(self._contents(tensors), self._expected, tensors, published)
        self._num_verified = self._turn + 1

    def _contents(self, tensors: Mapping[str, Tensor]) -> Mapping[str, int]:
        """Return the `content` of each weight. Raises WeightSyncError where that is found wrong."""
        held = {name: content(weight) for name, weight in self._own_weights()}
        turns = TURNS if self._turn else 1
        for number, unit in enumerate(self.products.units):
            found = unit.contents()
            if found is None:
                if number % turns == self._turn % turns and not unit.holds(tensors):
                    raise _not_held(" or ".join(unit.names))
                found = {name: content(tensors[name]) for name in unit.names if name not in held}
            for name, one in found.items():
                # A tied embedding is held twice.
                if held.setdefault(name, one) != one:
                    raise _not_held(name)
        return held

    def _own_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.decoder.named_parameters():
            if not weight.is_meta:
                yield name, weight


def prove(
    contents: Mapping[str, int],
    held: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    published: int,
) -> None:
    """Raise WeightSyncError unless weights of these `contents` have the ``published`` checksum.

    ``held``: tensors of their shapes and dtypes. ``tensors``: what was loaded, which is read only
    to say what is wrong.
    """
    found = checksum_of((name, held[name], one) for name, one in contents.items())
    if found == published:
        return
    for name, one in contents.items():
        if one != content(tensors[name]):
            raise _not_held(name)
    msg = f"checksum {found:x} of what arrived, {published:x} was published"
    raise WeightSyncError(msg)


def _not_held(name: str) -> WeightSyncError:
    return WeightSyncError(f"{name} is not held as it was published")
