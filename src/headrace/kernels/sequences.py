"""Several calls as one piece of work, for threads that meet once at its end and not after each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from headrace.kernels.calls import Call
from headrace.kernels.compiled import Kernel, argument, kernel
from headrace.kernels.vectors import I8, address_of, compile_time, pointer_to


def run_together(calls: Sequence[Call], num_threads: int, num_vectors: int) -> None:
    """Do all of the work of ``calls``; see `Call.run`, ``num_vectors`` being those of all of them.

    Each thread goes from one to the next as soon as nothing is left to take of it, so none may need
    what another one writes.
    """
    if len(calls) == 1:
        calls[0].run(num_threads, num_vectors)
        return
    places = np.array([call.begin() for call in calls], dtype=np.int64).reshape(-1)
    together = Call(sequence_kernel(), 3)
    together[1], together[2] = len(calls), places.ctypes.data
    together.run(num_threads, num_vectors)


@compile_time
def run_kernel(_context: Any, address: Any, pointer: Any) -> Any:
    """(address, pointer): run the kernel there on what ``pointer`` is the address of."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        word = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [word])
        called = pointer_to(builder, values[0], kind)
        builder.call(called, [builder.inttoptr(values[1], word)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@cache
def sequence_kernel() -> Kernel:
    """Run kernels one after another, as far as other threads have left something of each.

    Arguments: taken, which stays 0; n; the places [n, 2] of each kernel and its arguments.
    """

    def run_each(pointer: Any) -> None:
        call = address_of(pointer)
        for index in range(argument(call, 1)):
            place = argument(call, 2) + 16 * index
            run_kernel(argument(place, 0), argument(place, 1))

    return kernel(run_each)
