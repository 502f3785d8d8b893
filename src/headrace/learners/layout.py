"""How the work of a learner lies: on one process, or on ranks that make each step together.

Owns what a step asks of the others: which groups are this rank's, that all ranks make as many
passes (each pass is a collective), and that what is counted, clipped and judged is of all of them.
`Alone` is one process, to which nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.learners.loss import Readings, read_tokens
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch
from headrace.learners.selection import TrainingGroup
from headrace.learners.value_head import ValueHead, named_parameters
from headrace.models.foreign import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSetting:
    """What a forward pass depends on beside weights and batch."""

    temperature: float
    dtype: torch.dtype
    """Of matrix products."""
    entropy_gradient: bool


class Layout(Protocol):
    """What a step asks of the ranks that make it, this one included.

    Every rank calls the same methods in the same order.
    """

    def parameters(self, decoder: Policy, head: ValueHead | None) -> Mapping[str, Parameter]:
        """Return what this rank holds of each parameter, by name; an update changes these."""
        ...

    def read(
        self, decoder: Policy, head: ValueHead | None, batch: Microbatch, setting: ReadingSetting
    ) -> Readings:
        """Return what the whole policy says of ``batch``, which is this rank's own."""
        ...

    def share(self, groups: Sequence[TrainingGroup]) -> Sequence[TrainingGroup]:
        """Return the part of ``groups`` that this rank computes; all parts together are all."""
        ...

    def padded(self, batches: Sequence[Microbatch], device: torch.device) -> list[Microbatch]:
        """Return ``batches`` and as many idle ones as let every rank make as many passes."""
        ...

    def total(self, sums: LossSums) -> LossSums:
        """Return the sums of all ranks, the same on each of them."""
        ...

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of ``values``, which have one shape on all of them."""
        ...

    def gathered(self, values: Tensor) -> Tensor:
        """Return ``values`` [any number] of all ranks, one after another."""
        ...

    def take_gradients(self) -> None:
        """Give `parameters` the gradient that the backward passes since the last call added up."""
        ...

    def gradient_norm(self) -> float:
        """Return the global L2 norm of what `take_gradients` took."""
        ...


class Alone:
    """One process that holds everything."""

    def __init__(self) -> None:
        self._parameters: dict[str, Parameter] = {}

    def parameters(self, decoder: Policy, head: ValueHead | None) -> Mapping[str, Parameter]:
        """See `Layout`: the parameters themselves."""
        self._parameters = dict(decoder.named_parameters()) | named_parameters(head)
        return self._parameters

    def read(
        self, decoder: Policy, head: ValueHead | None, batch: Microbatch, setting: ReadingSetting
    ) -> Readings:
        """See `Layout`."""
        return read_tokens(
            decoder,
            batch,
            setting.temperature,
            setting.dtype,
            entropy_gradient=setting.entropy_gradient,
            head=head,
        )

    def share(self, groups: Sequence[TrainingGroup]) -> Sequence[TrainingGroup]:
        """See `Layout`: all of them."""
        return groups

    def padded(self, batches: Sequence[Microbatch], device: torch.device) -> list[Microbatch]:
        """See `Layout`."""
        del device
        return list(batches)

    def total(self, sums: LossSums) -> LossSums:
        """See `Layout`."""
        return sums

    def summed(self, values: Tensor) -> Tensor:
        """See `Layout`."""
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """See `Layout`."""
        return values

    def take_gradients(self) -> None:
        """See `Layout`: they are where they belong."""

    def gradient_norm(self) -> float:
        """See `Layout`."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))
