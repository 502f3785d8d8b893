"""Where a run computes: the one place that asks which devices this machine has."""

from __future__ import annotations

from typing import assert_never

import torch

from headrace.config import DeviceName, RunConfig

CPU = torch.device("cpu")


def resolve_device(name: DeviceName) -> torch.device:
    """Return where learner and torch engine compute; ``auto`` is a CUDA device if there is one."""
    match name:
        case "auto":
            return torch.device("cuda") if torch.cuda.is_available() else CPU
        case "cpu" | "cuda":
            return torch.device(name)
        case _:
            assert_never(name)


def missing_device(name: DeviceName) -> str | None:
    """Return why ``name`` cannot be used here and what to do; None where it can."""
    if name != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a build with it, or use "
            '"auto" or "cpu"'
        )
    return 'torch finds no CUDA device; see to the driver (nvidia-smi), or use "auto" or "cpu"'


def engine_device(config: RunConfig) -> torch.device:
    """Return where rollouts are sampled. vLLM and SGLang do not ask ``config.device``.

    SGLang's servers may be elsewhere: this machine stands for them.
    """
    match config.generator.engine:
        case "torch":
            return resolve_device(config.device)
        case "vllm" | "sglang":
            return resolve_device("auto")
        case _:
            assert_never(config.generator.engine)
