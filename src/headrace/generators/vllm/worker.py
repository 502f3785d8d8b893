"""The receiving end of the weights, inside vLLM's worker processes. Imported by vLLM alone.

Registers a weight-transfer engine that loads a `Segment`. An update is refused before anything of
the old weights is touched unless the segment has the published checksum; afterwards whatever vLLM
lets one read back is compared with what was published (see `read_back`).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from headrace.generators.vllm.processes import FOLDER_PREFIX
from headrace.generators.vllm.read_back import packed_and_readable, read_back
from headrace.generators.vllm.segment import SegmentInfo, read_segment
from headrace.models.weights import checksum


@dataclass
class Owner(WeightTransferInitInfo):
    """Who the engine belongs to."""

    owner_pid: int


@dataclass
class SegmentUpdate(WeightTransferUpdateInfo):
    """What `update_weights` is sent: a `SegmentInfo`, as `to_json` writes it."""

    segment: dict[str, Any]


class SegmentTransferEngine(WeightTransferEngine[Owner, SegmentUpdate]):
    """Loads weights from shared memory, whole or not at all."""

    init_info_cls = Owner
    update_info_cls = SegmentUpdate
    report: dict[str, int]
    """Of the last update: the checksum of the loaded bytes and what was read back."""

    def init_transfer_engine(self, init_info: Owner) -> None:
        """End with the owner; every update names its own segment, so nothing else is to be met."""
        ends = threading.Thread(
            target=end_with, args=(init_info.owner_pid, os.getppid()), name="owner", daemon=True
        )
        ends.start()

    def start_weight_update(self) -> None:
        """Touch nothing yet: an update that does not fit must leave the old weights."""

    def finish_weight_update(self) -> None:
        """All was done when the segment was received."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one segment; the base class would wait for an accelerator that may not exist."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SegmentUpdate) -> None:
        """Prove that the segment is whole, load it, and compare what can be read back."""
        info = SegmentInfo.from_json(update_info.segment)
        weights = read_segment(info)
        received = checksum(weights.items())
        if received != info.checksum:
            msg = f"checksum {received:x} of the received weights, {info.checksum:x} was published"
            raise ValueError(msg)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        renew_packed(self.model)
        self.report = {"checksum": received} | read_back(
            self.model, weights, tensor_parallel=self.parallel_config.tensor_parallel_size > 1
        )

    def shutdown(self) -> None:
        """Segments are closed by whoever wrote them."""


def end_with(owner_pid: int, parent_pid: int) -> None:
    """Kill this process and its parent, an engine core, once the owner is gone.

    vLLM's engine core does not see that who started it was killed, and would keep its memory for
    ever. Waits for the end of the owner, and for nothing else. The owner's folder for their
    temporary files goes too.
    """
    descriptor = os.pidfd_open(owner_pid)
    select.select([descriptor], [], [])
    if Path(tempfile.gettempdir()).name.startswith(FOLDER_PREFIX):
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    if parent_pid != owner_pid:  # else the worker lives inside the core
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent_pid, signal.SIGKILL)
    os._exit(1)


def renew_packed(model: nn.Module) -> None:
    """Pack once more what vLLM packs for a processor beside a weight that it also keeps.

    vLLM packs a tied output head when the model is built and leaves it as it was when the
    embedding that it shares is loaded again: logits would still come from the old weights.
    """
    for module in packed_and_readable(model):
        layer: Any = module
        layer.quant_method.process_weights_after_loading(layer)


class WeightReceiver:
    """Mixed into vLLM's worker class; importing it registers the transfer engine."""

    weight_transfer_engine: SegmentTransferEngine
    """The worker's own attribute."""

    def process_id(self) -> int:
        """Return the worker's own, by which it is seen to live."""
        return os.getpid()

    def loaded_weights_report(self) -> dict[str, int]:
        """Return what the last update loaded."""
        report: dict[str, int] = self.weight_transfer_engine.report
        return report


WeightTransferEngineFactory.register_engine("headrace", SegmentTransferEngine)
