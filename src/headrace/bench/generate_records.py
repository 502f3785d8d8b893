"""What `bench generate` tells its processes, as a JSON file.

Apart from `generate_run`, because that one is a program: whoever starts it must not have imported
it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

SHORT_NAMES = {"bfloat16": "bf16", "float32": "fp32", "int8": "int8"}
"""What a plan's dtype is called in the names of figures."""

Engine: TypeAlias = Literal["headrace", "hf", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan:
    """One engine on one workload."""

    engine: Engine
    model: str
    """Model directory."""
    dtype: str = "bfloat16"
    num_threads: int = 1
    num_groups: int = 8
    group_size: int = 8
    num_prompt_tokens: int = 64
    num_new_tokens: int = 64
    """Of each rollout, or their mean where ``length_sigma`` spreads them."""
    length_sigma: float = 0.0
    """Of the logarithm of a group's length; 0 makes all equal."""
    max_concurrent_rollouts: int = 512
    num_repetitions: int = 3
    enforce_eager: bool = True
    """Of vLLM alone: run the model as it is written, which starts without a C++ compiler."""

    def write(self, path: Path) -> None:
        """Write the plan for the process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
