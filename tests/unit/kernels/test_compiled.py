"""How kernels are compiled and kept."""

from __future__ import annotations

import numpy as np
import pytest
from numba.core import caching

from headrace.kernels.calls import Call
from headrace.kernels.compiled import argument, kernel
from headrace.kernels.vectors import add_to, address_of


def test_where_nothing_may_be_written_kernels_are_compiled_in_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    def count(pointer: object) -> None:
        add_to(argument(address_of(pointer), 1), 3)

    counted = np.zeros(1, dtype=np.int64)
    call = Call(kernel(count), 2)
    call[1] = counted.ctypes.data
    call.run()
    assert counted[0] == 3
