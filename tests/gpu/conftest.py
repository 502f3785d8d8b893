from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from cuda_lab import CudaLab

from headrace.generators.torch_engine.cuda.table_attention import PagedDecode

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DECODE_KERNEL = "headrace.generators.torch_engine.cuda.decode_kernel"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def lab() -> CudaLab:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaLab("cuda")


@pytest.fixture
def paged_decode() -> PagedDecode:
    """The kernel, for tests on a device."""
    kernel: PagedDecode = pytest.importorskip(DECODE_KERNEL).paged_decode
    return kernel


@pytest.fixture
def kernel_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernel runs: on a device, or on the processor in Triton's interpreter."""
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        _teach_bfloat16(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs the kernel on the processor")
    return torch.device("cuda")


def _teach_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply bfloat16, whose bits Triton 3.6's takes for whole numbers."""
    import numpy as np  # noqa: PLC0415 - with triton alone
    import triton.language as tl  # noqa: PLC0415 - as above
    from triton.runtime import interpreter  # noqa: PLC0415 - as above

    builder = interpreter.InterpreterBuilder
    create_dot = builder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        bits = handle.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def widening(
        self: interpreter.InterpreterBuilder,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        *rest: object,
    ) -> interpreter.TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(builder, "create_dot", widening)
