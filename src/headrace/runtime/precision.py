"""Which number format ``auto`` stands for on a device."""

from __future__ import annotations

from pathlib import Path

import torch

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a config value, for computing on ``device``.

    ``auto`` is bfloat16 where the hardware multiplies in it. A processor without such instructions
    emulates them, slower than fp32. ``int8`` is of matrices alone; this is that of all the rest,
    as with ``auto``.
    """
    if name in {"auto", "int8"}:
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    return named_dtype(name)


def named_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that is called ``name``."""
    return _DTYPES[name]


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are faster than in fp32 on ``device``."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    path = Path("/proc/cpuinfo")
    flags = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags
