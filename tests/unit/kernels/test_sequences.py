from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.calls import Call
from headrace.kernels.checksums import checksum_kernel
from headrace.kernels.sequences import run_together
from headrace.models.weights import EVEN, content


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_calls", [1, 2, 70])
def test_calls_that_are_run_together_do_what_each_does_alone(
    num_calls: int, num_threads: int
) -> None:
    matrices = [torch.randn(1 + 7 * number % 300, 64) for number in range(num_calls)]
    totals = np.zeros(num_calls, dtype=np.int64)
    calls = [Call(checksum_kernel(EVEN), 5) for _ in matrices]
    for number, (call, matrix) in enumerate(zip(calls, matrices, strict=True)):
        call[1], call[2] = len(matrix), 32
        call[3], call[4] = matrix.data_ptr(), totals[number:].ctypes.data
    for _ in range(2):  # what was taken before is there to be taken again
        totals[:] = 0
        run_together(calls, num_threads, 1 << 20)
        assert totals.tolist() == [content(matrix) for matrix in matrices]
