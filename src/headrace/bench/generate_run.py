"""One engine on one workload of `bench generate`: the program of a process of its own.

Run as ``python -m headrace.bench.generate_run PLAN RESULT``. Every engine gets the same prompts and
samples the same number of tokens of each at temperature 1; nothing ends a rollout early. Measured:
seconds from handing over the requests to the last rollout, prefill included. Not measured: loading.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from headrace.bench import vllm_peer
from headrace.bench.generate_records import GeneratePlan
from headrace.bench.generate_workload import engine_of, lengths, prompts, requests
from headrace.bench.timing import least_seconds, memcpy_seconds

if TYPE_CHECKING:
    from headrace.types import WeightUpdate

Seconds = list[float]


def run(plan: GeneratePlan) -> dict[str, Any]:
    """Return the seconds of every repetition, and what else the engine can say of itself."""
    import torch

    torch.set_num_threads(plan.num_threads if plan.engine == "hf" else 1)
    match plan.engine:
        case "headrace":
            return _run_headrace(plan)
        case "hf":
            return _run_hf(plan)
        case "vllm":
            return vllm_peer.run(plan, prompts(plan, _vocabulary(plan)))
        case _:
            assert_never(plan.engine)


def _vocabulary(plan: GeneratePlan) -> int:
    config = json.loads((Path(plan.model) / "config.json").read_text(encoding="utf-8"))
    return int(config["vocab_size"])


def _run_headrace(plan: GeneratePlan) -> dict[str, Any]:

    from headrace.compute import ComputeThread
    from headrace.models.checkpoint import load_decoder
    from headrace.models.weights import weight_update
    from headrace.runtime.devices import CPU
    from headrace.runtime.precision import resolve_dtype

    dtype = resolve_dtype(plan.dtype, CPU)
    decoder = load_decoder(Path(plan.model), dtype)
    tensors = {name: weight.detach() for name, weight in decoder.named_parameters()}
    update = weight_update(0, tensors)
    compute = ComputeThread("generator", plan.num_threads)

    async def main() -> dict[str, Any]:
        generator = engine_of(plan, decoder.config, compute)

        async def once(repetition: int) -> float:
            asked = requests(plan, decoder.config.vocab_size, seed=repetition)
            began = time.perf_counter()
            async for _ in generator.generate(asked):
                pass
            return time.perf_counter() - began

        await generator.update_weights(update)
        await once(0)
        updates = [await _timed_update(generator.update_weights, update) for _ in range(3)]
        seconds = []
        for repetition in range(plan.num_repetitions):
            # As in training: nothing of the last step is found in the cache.
            await generator.update_weights(update)
            seconds.append(await once(repetition + 1))
        await generator.close()

        def measured(measure: Callable[[], float]) -> float:
            return compute.submit(measure).result()

        return {
            "seconds": seconds,
            "num_tokens": plan.group_size * sum(lengths(plan)),
            "update_seconds": min(updates),
            "memcpy_seconds": measured(lambda: memcpy_seconds(list(tensors.values()))),
            "linear_seconds": measured(lambda: _linear_seconds(plan, Path(plan.model))),
        }

    return asyncio.run(main())


async def _timed_update(
    update_weights: Callable[[WeightUpdate], Any], update: WeightUpdate
) -> float:
    began = time.perf_counter()
    await update_weights(update)
    return time.perf_counter() - began


def _linear_seconds(plan: GeneratePlan, model: Path) -> float:
    """Return the time that the matrix products of one repetition take alone.

    In the fastest form known here, on the rows that are really computed: every prompt once, then
    one row for each rollout and step.
    """
    import torch

    from headrace.generators.torch_engine.products import FusedProducts
    from headrace.models.checkpoint import load_decoder
    from headrace.runtime.devices import CPU
    from headrace.runtime.precision import resolve_dtype

    dtype = resolve_dtype(plan.dtype, CPU)
    decoder = load_decoder(model, dtype)
    products = FusedProducts(decoder, dtype, CPU, is_quantized=plan.dtype == "int8")
    with torch.no_grad():
        products.load({name: weight.detach() for name, weight in decoder.named_parameters()})

    def seconds(num_rows: int, num_logit_rows: int) -> float:
        widths = {linears[0].in_features for linears in decoder.linears()}
        hidden = {width: torch.randn(num_rows, width).to(dtype) for width in widths}
        last = torch.randn(num_logit_rows, decoder.config.hidden_size).to(dtype)
        logits = torch.empty(num_logit_rows, decoder.config.vocab_size)

        @torch.inference_mode()
        def multiply() -> None:
            for linears in decoder.linears():
                products(hidden[linears[0].in_features], linears)
            products.logits(last, logits)

        return least_seconds(multiply)

    rollouts = plan.num_groups * plan.group_size
    prefill = seconds(plan.num_groups * plan.num_prompt_tokens, plan.num_groups)
    return prefill + (plan.num_new_tokens - 1) * seconds(rollouts, rollouts)


def _run_hf(plan: GeneratePlan) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(plan.model, dtype=getattr(torch, plan.dtype))
    ids = torch.tensor(prompts(plan, model.config.vocab_size))

    def once(seed: int) -> float:
        torch.manual_seed(seed)
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=plan.group_size,
            min_new_tokens=plan.num_new_tokens,
            max_new_tokens=plan.num_new_tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - began

    once(0)
    seconds = [once(repetition + 1) for repetition in range(plan.num_repetitions)]
    num_tokens = plan.num_groups * plan.group_size * plan.num_new_tokens
    return {"seconds": seconds, "num_tokens": num_tokens}


def main(plan_path: str, result_path: str) -> None:
    """Read the plan, run it, write what it took."""
    plan = GeneratePlan(**json.loads(Path(plan_path).read_text(encoding="utf-8")))
    Path(result_path).write_text(json.dumps(run(plan)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
