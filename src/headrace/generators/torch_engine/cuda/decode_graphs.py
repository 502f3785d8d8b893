"""Decode passes as captured graphs, one for each of a few numbers of rows.

A decode pass of a small model is hundreds of kernels that take less time to run than to launch; a
graph launches them at once. It is a recording of kernels and addresses: everything it reads lies in
the same place for ever, and only what lies there changes. So rows are filled up to the next
number that there is a graph for; rows of nobody read and write a scratch block of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.generators.torch_engine.cuda.table_attention import DecodeInputs
from headrace.generators.torch_engine.forms import rounded_rows

MOST_ROWS = 512
"""Rows of the largest graph. With more the device is busy for longer than launching takes."""


class Graph(Protocol):
    """A recording of one computation."""

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """Record ``compute``, which may be called more than once; return where its result lies."""
        ...

    def replay(self) -> None:
        """Compute once more from what lies at the recorded addresses now."""
        ...


class CudaGraph:
    """A `Graph` of torch's."""

    def __init__(self, pool: tuple[int, int]) -> None:
        """``pool``: memory that graphs share; one is replayed at a time and none needs another's.

        Results are kept by whoever holds them.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    @classmethod
    def maker(cls) -> Callable[[], CudaGraph]:
        """Return what makes graphs of one pool."""
        pool = torch.cuda.graph_pool_handle()
        return lambda: cls(pool)

    def capture(self, compute: Callable[[], Tensor]) -> Tensor:
        """See `Graph`."""
        # Kernels are compiled and libraries take their memory when they are first used, and
        # neither may happen while a graph is captured.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        # What other threads do on the device, a learner say, is not recorded and allowed.
        with torch.cuda.graph(
            self._graph,
            pool=self._pool,  # type: ignore[arg-type]  # the type has no public name
            capture_error_mode="thread_local",
        ):
            return compute()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


class DecodeGraphs:
    """Runs decode passes of up to `max_rows` rows by graphs, each captured when first needed."""

    def __init__(
        self,
        forward: Callable[[DecodeInputs], Tensor],
        make_graph: Callable[[], Graph],
        *,
        max_rows: int,
        max_blocks: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        """``forward`` returns [n, ...], row by row, and reads nothing that ever moves.

        Rows have ``max_blocks`` blocks at most; ``scratch`` is a block of nobody's.
        """
        self.max_rows = rounded_rows(max_rows)
        """Rows of the largest graph."""
        self._forward, self._make_graph = forward, make_graph
        self._scratch, self._device = scratch, device
        shape = (self.max_rows, max_blocks)
        self._table = torch.full(shape, scratch, dtype=torch.int32, device=device)
        self._layout: int | None = None
        self._captured: dict[int, tuple[Graph, DecodeInputs, Tensor]] = {}

    def __call__(self, numbers: Tensor, table: Tensor, layout: int) -> Tensor:
        """Return what `forward` does for n rows, valid until the next call.

        ``numbers`` [3, n] and ``table`` [n, T], both on the CPU, are as in `DecodeInputs`; the
        table is read again when ``layout`` is another than last time.
        """
        num_rows = numbers.shape[1]
        if layout != self._layout:
            self._table[:num_rows, : table.shape[1]] = table.to(torch.int32).to(self._device)
            self._table[num_rows:, 0] = self._scratch
            self._layout = layout
        size = rounded_rows(num_rows)
        # Rows of nobody have one token, of id 0, in the scratch block.
        filled = numbers.new_zeros(3, size)
        filled[2] = self._scratch
        filled[:, :num_rows] = numbers
        if size not in self._captured:
            self._captured[size] = self._capture(filled)
        graph, inputs, result = self._captured[size]
        inputs.numbers.copy_(filled)
        graph.replay()
        return result[:num_rows]

    def _capture(self, numbers: Tensor) -> tuple[Graph, DecodeInputs, Tensor]:
        """Capture a pass over as many rows as ``numbers`` [3, size] has."""
        graph = self._make_graph()
        # What is computed while capturing is this very step, so it writes what replaying writes.
        inputs = DecodeInputs(
            numbers=numbers.to(self._device, copy=True), table=self._table[: numbers.shape[1]]
        )
        return graph, inputs, graph.capture(lambda: self._forward(inputs))
