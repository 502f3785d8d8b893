"""What this machine offers: processor, memory, accelerators, packages, models."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headrace import __version__
from headrace.errors import ModelError
from headrace.kernels.calls import parallel_function
from headrace.kernels.vectors import has_feature
from headrace.models.catalogue import BUNDLED, FETCHABLE, cache_directory, resolve_model
from headrace.runtime.devices import CPU
from headrace.runtime.engines import SGLANG_REMEDY, missing_engine, vllm_remedy, vllm_version
from headrace.runtime.precision import has_native_bfloat16
from headrace.verifiers.sandbox.execution import Tier
from headrace.verifiers.sandbox.tiers import probe

_EXTRAS = {
    "reasoning-gym": ("envs", "prompts from reasoning-gym tasks"),
    "gguf": ("fetch", "models that only the package index carries"),
    "uvicorn": ("serve", "`headrace serve-verifiers`"),
    "ray": ("ray", "`headrace train --runtime ray`, on many machines"),
    "trl": ("trl", "the peer of `headrace bench step`"),
}
"""Distribution -> the extra that brings it, and what for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is there or is not."""

    name: str
    present: bool
    detail: str
    remedy: str = ""
    """What to do if it is wanted and missing."""

    def to_json(self) -> dict[str, object]:
        """Return everything but the name."""
        return {"present": self.present, "detail": self.detail, "remedy": self.remedy}


def diagnose() -> list[Finding]:
    """Look at everything. Tries the sandbox by starting it, and reaches no network."""
    return [
        *_machine(),
        _kernels(),
        *_accelerators(),
        _isolation(),
        *_sandbox(),
        *_engines(),
        *(_package(name, extra, purpose) for name, (extra, purpose) in _EXTRAS.items()),
        *(_model(name) for name in (*BUNDLED, *FETCHABLE)),
    ]


def _machine() -> Iterator[Finding]:
    yield Finding(
        name="headrace",
        present=True,
        detail=f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}",
    )
    bfloat16 = "native bfloat16" if has_native_bfloat16(CPU) else "bfloat16 emulated, use float32"
    yield Finding(
        name="processor",
        present=True,
        detail=f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {bfloat16}",
    )
    free = shutil.disk_usage(cache_directory().anchor).free / 2**30
    yield Finding(name="disk", present=free > 1, detail=f"{free:.0f} GiB free")


def _kernels() -> Finding:
    """The torch engine's kernels run on every processor, faster with these instructions."""
    used = [
        name for name in ("avx512f", "avx512bf16", "avx512vnni", "amx-bf16") if has_feature(name)
    ]
    threads = parallel_function()
    return Finding(
        name="kernels",
        present=threads is not None,
        detail=f"numba {importlib.metadata.version('numba')}, "
        + (", ".join(used) if used else "none of AVX-512's instructions")
        + ("" if threads else "; on one thread: torch's OpenMP runtime was not found"),
        remedy=""
        if threads
        else "use a torch built with OpenMP; on systems other than Linux kernels have one thread",
    )


def _accelerators() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            name="cuda", present=False, detail="no CUDA device; training runs on the processor"
        )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(
            name=f"cuda:{index}",
            present=True,
            detail=f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB; "
            + ("learner and torch engine compute here" if index == 0 else "not used"),
        )


def _isolation() -> Finding:
    """Math grading and reward functions run in killable processes with capped memory."""
    capped = hasattr(resource, "RLIMIT_AS") and platform.system() == "Linux"
    return Finding(
        name="isolation",
        present=capped,
        detail="killable processes with capped memory"
        if capped
        else "killable processes; this system does not cap their memory",
    )


def _sandbox() -> Iterator[Finding]:
    """Where code that a policy wrote could be run; the strongest that works is taken."""
    for tier in (Tier.CELL, Tier.BUBBLEWRAP, Tier.LOCK):
        report = probe(tier)
        yield Finding(
            name=f"sandbox {tier}",
            present=report.works,
            detail=report.detail,
            remedy=report.remedy,
        )


def _engines() -> Iterator[Finding]:
    yield Finding(name="engine torch", present=True, detail=f"torch {torch.__version__}, built in")
    version, missing = vllm_version(), missing_engine("vllm")
    yield Finding(
        name="engine vllm",
        present=missing is None,
        detail=version or "not installed: rollouts sampled by vLLM",
        remedy="" if missing is None else vllm_remedy() if version is None else missing,
    )
    missing = missing_engine("sglang")
    yield Finding(
        name="engine sglang",
        present=missing is None,
        detail="its client is here; its servers run elsewhere" if missing is None else "no client",
        remedy="" if missing is None else SGLANG_REMEDY,
    )


def _package(name: str, extra: str, purpose: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name=name,
            present=False,
            detail=f"not installed: {purpose}",
            remedy=f"pip install -c constraints.txt -e '.[{extra}]' in the source folder",
        )
    return Finding(name=name, present=True, detail=version)


def _model(name: str) -> Finding:
    try:
        directory = resolve_model(name)
    except ModelError as error:
        return Finding(
            name=f"model {name}",
            present=False,
            detail=str(error),
            remedy=f"headrace fetch {name}",
        )
    return Finding(name=f"model {name}", present=True, detail=str(directory))
