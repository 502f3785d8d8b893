"""From ``[learner.lora]`` to a decoder with an adapter."""

from __future__ import annotations

from headrace.config import LoraConfig
from headrace.models.adapter_files import AdapterShape
from headrace.models.decoder import Decoder
from headrace.models.lora import add_adapter, read_adapter, set_adapter


def adapter_shape(config: LoraConfig) -> AdapterShape:
    """Return what the adapter is."""
    return AdapterShape(rank=config.rank, alpha=config.alpha, targets=config.targets)


def begin_adapter(decoder: Decoder, config: LoraConfig, *, seed: int) -> None:
    """Freeze ``decoder`` and give it the adapter that training starts from.

    Raises ModelError where the adapter to start from does not fit.
    """
    add_adapter(decoder, adapter_shape(config), seed=seed)
    if config.start is not None:
        set_adapter(decoder, read_adapter(decoder, config.start))
