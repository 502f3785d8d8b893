"""The kernels, compiled for devices that need not be there: triton alone is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

triton = pytest.importorskip("triton")

KERNEL = "headrace.generators.torch_engine.cuda.decode_kernel"
NUMBERS = {
    "num_kv_heads": "i32",
    "block_size": "i32",
    "table_row": "i32",
    "num_splits": "i32",
}
SHARED_MEMORY = 99 * 1024
"""Bytes of it that a program may take on the smallest of the devices since Ampere."""


def compiled(kernel: str, capability: int, signature: dict[str, str], sizes: dict[str, int]) -> Any:  # noqa: ANN401 - triton's own
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - needs triton

    module = importlib.import_module(KERNEL)
    signature = signature | dict.fromkeys(sizes, "constexpr")
    source = triton.compiler.ASTSource(
        fn=getattr(module, kernel), signature=signature, constexprs=sizes
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_stages": module.STAGES})


@pytest.fixture(autouse=True)
def _not_interpreted() -> None:
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 compiles nothing")


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "num_splits"),
    [
        (80, "bf16", 64, 1),
        (80, "bf16", 256, 4),
        (80, "fp32", 128, 4),
        (86, "fp32", 256, 4),
        (90, "bf16", 128, 4),
        (90, "fp16", 80, 1),
        (90, "fp32", 256, 1),
        (100, "bf16", 64, 4),
    ],
)
def test_the_kernels_compile_and_their_tiles_fit(
    capability: int, dtype: str, width: int, num_splits: int
) -> None:
    kernel = importlib.import_module(KERNEL)
    columns = triton.next_power_of_2(width)
    tokens = kernel.tile_for(columns, 4 if dtype == "fp32" else 2)
    signature = {
        **dict.fromkeys(("query", "keys", "values"), f"*{dtype}"),
        "table": "*i32",
        "positions": "*i64",
        **dict.fromkeys(("partial", "largest", "total"), "*fp32"),
        "scale": "fp32",
        "window": "i32",
        **NUMBERS,
    }
    sizes = {"REPEATS": 3, "HEADS": 16, "WIDTH": width, "COLUMNS": columns, "TOKENS": tokens}
    if num_splits == 1:  # which triton takes for a constant
        del signature["num_splits"]
        sizes["num_splits"] = 1
    split = compiled("_split_kernel", capability, signature, sizes)
    assert split.asm["cubin"]
    assert split.metadata.shared <= SHARED_MEMORY
    signature = {
        **dict.fromkeys(("partial", "largest", "total"), "*fp32"),
        "mixed": f"*{dtype}",
        "num_splits": "i32",
    }
    sizes = {"REPEATS": 3, "WIDTH": width, "COLUMNS": columns, "SPLITS": 16}
    assert compiled("_join_kernel", capability, signature, sizes).asm["cubin"]
