"""What the engine is started with, and the environment that vLLM reads it from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headrace.config import VllmConfig
from headrace.host import available_memory

LARGEST_DEFAULT_CACHE = 4 << 30
"""Bytes of keys and values on a processor when nobody says how many."""
CACHE_SHARE = 0.25
"""Of the free memory of a processor, how much that default takes at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Everything that one start of vLLM depends on."""

    model: Path
    """Directory with config.json. Weights are not read from it: the first update brings them."""
    dtype: torch.dtype
    options: VllmConfig = field(default_factory=VllmConfig)
    max_concurrent_rollouts: int = 512
    max_prefill_tokens: int = 8192
    max_cache_bytes: int | None = None
    num_threads: int | None = None
    """CPU threads of a worker; None takes every core."""

    @property
    def on_processor(self) -> bool:
        """Whether vLLM computes on the processor, for want of a GPU."""
        return not torch.cuda.is_available()

    @property
    def enforce_eager(self) -> bool:
        """Whether the model runs as it is written."""
        chosen = self.options.enforce_eager
        return self.on_processor if chosen is None else chosen

    def arguments(self) -> dict[str, object]:
        """Return the keyword arguments of vLLM's ``AsyncEngineArgs``."""
        options = self.options
        return {
            "model": str(self.model),
            "dtype": str(self.dtype).removeprefix("torch."),
            # Token in, token out: text is made by headrace's own tokenizer.
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "generation_config": "vllm",
            "enforce_eager": self.enforce_eager,
            "max_model_len": options.max_model_len,
            "block_size": options.block_size,
            "enable_prefix_caching": options.prefix_caching,
            "tensor_parallel_size": options.tensor_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": self._cache_bytes(),
            "max_num_seqs": self.max_concurrent_rollouts,
            # vLLM counts the decoded tokens of a step as well.
            "max_num_batched_tokens": self.max_prefill_tokens + self.max_concurrent_rollouts,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "worker_extension_cls": "headrace.generators.vllm.worker.WeightReceiver",
            "weight_transfer_config": {"backend": "headrace"},
        }

    def _cache_bytes(self) -> int | None:
        """Return the bytes of the cache; None leaves them to vLLM, which measures a GPU itself."""
        if self.max_cache_bytes is not None or not self.on_processor:
            return self.max_cache_bytes
        free = available_memory() or LARGEST_DEFAULT_CACHE
        return min(LARGEST_DEFAULT_CACHE, int(CACHE_SHARE * free))

    def environment(self) -> dict[str, str]:
        """Return what vLLM and the libraries below it read when they are imported."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            # A fork would copy the locks of the threads that compute here.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if self.on_processor:
            threads = self.num_threads or os.cpu_count() or 1
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
            if self.enforce_eager:
                # vLLM compiles parts of its sampler even then, which takes a compiler and seconds.
                variables["TORCHDYNAMO_DISABLE"] = "1"
        return variables


@contextmanager
def exported(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside, then put them back.

    What the user has set for vLLM itself stays as it is.
    """
    mine = {
        name: value
        for name, value in variables.items()
        if not (name.startswith("VLLM_") and name in os.environ)
    }
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
