from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_lab import CudaLab, assert_alike, run_out, slow_paged_decode
from torch import Tensor

from headrace.compute import ComputeThread
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine.cuda.decode_graphs import CudaGraph
from headrace.generators.torch_engine.cuda.runner import CudaRunner
from headrace.generators.torch_engine.cuda.table_attention import PagedDecode
from headrace.generators.torch_engine.sampling import uniforms
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.decoder import Decoder
from headrace.types import GenerationRequest, Rollout, RolloutGroup


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "mistral", "sliding_window": 5}, {"attention_bias": True}],
    ids=["llama", "sliding", "biases"],
)
def test_rollouts_are_those_of_the_processor(
    lab: CudaLab,
    paged_decode: PagedDecode,
    changes: dict[str, Any],
    *,
    has_kernel: bool,
    has_graphs: bool,
) -> None:
    decoder = lab.decoder(**changes)
    mix = paged_decode if has_kernel else slow_paged_decode
    engine = lab.engine(decoder, mix, CudaGraph.maker() if has_graphs else None)
    found = run_out(engine, lab.requests())
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))


def test_without_triton_the_plain_runner_serves_a_device_as_well(lab: CudaLab) -> None:
    decoder = lab.decoder()
    found = run_out(lab.plain_engine(decoder, "cuda"), lab.requests())
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"raw_logprobs": True, "temperature": 1.3},
        {"kept_support": True, "top_p": 0.8},
        {"allowed_token_ids": tuple(range(50)), "banned_token_ids": (3, 5)},
        {"forced_prefix": (9, 8, 7), "max_tokens": 12},
    ],
    ids=["greedy", "filters", "raw", "support", "masks", "prefix"],
)
def test_sampling_on_the_device_draws_what_the_processor_draws(
    lab: CudaLab, paged_decode: PagedDecode, sampling: dict[str, Any]
) -> None:
    decoder = lab.decoder()
    requests = lab.requests(**{"max_tokens": 20, **sampling})
    found = run_out(lab.engine(decoder, paged_decode, CudaGraph.maker()), requests)
    expected = run_out(lab.plain_engine(decoder), requests)
    assert_alike(found, expected)
    for one, other in zip(rollouts(found), rollouts(expected), strict=True):
        assert one.kept_support == other.kept_support
        assert (one.raw_logprobs is None) == (other.raw_logprobs is None)
        assert one.raw_logprobs is None or one.raw_logprobs == pytest.approx(
            other.raw_logprobs, abs=1e-4
        )


@pytest.mark.parametrize("is_quantized", [True, False])
def test_new_weights_are_sampled_from_by_graphs_captured_under_the_former_ones(
    lab: CudaLab, paged_decode: PagedDecode, *, is_quantized: bool
) -> None:
    first, second = (lab.decoder(seed=n, attention_bias=True) for n in range(2))
    engine = lab.engine(first, paged_decode, CudaGraph.maker(), is_quantized=is_quantized)
    run_out(engine, lab.requests())
    engine.load(lab.update(second, version=2))
    found = run_out(engine, lab.requests())
    fresh = lab.engine(second, paged_decode, None, is_quantized=is_quantized)
    assert_alike(found, run_out(fresh, lab.requests()))


def test_eight_bits_stay_as_near_to_the_weights_as_on_the_processor(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    decoder = lab.decoder()
    engine = lab.engine(decoder, paged_decode, CudaGraph.maker(), is_quantized=True)
    on_device = gaps(decoder, lab.requests(), run_out(engine, lab.requests()))
    plain = lab.plain_engine(decoder, is_quantized=True)
    on_processor = gaps(decoder, lab.requests(), run_out(plain, lab.requests()))
    assert on_device.mean() <= 1.5 * on_processor.mean()
    assert on_device.mean() < 0.1


def test_log_probs_in_bfloat16_are_near_those_of_a_full_pass(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    decoder = lab.decoder(dtype=torch.bfloat16)
    found = run_out(lab.engine(decoder, paged_decode, CudaGraph.maker()), lab.requests())
    found_gaps = gaps(decoder.float(), lab.requests(), found)
    assert found_gaps.mean() < 0.05


def test_rollouts_are_preempted_and_go_on_where_blocks_are_few(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    decoder = lab.decoder()
    engine = lab.engine(decoder, paged_decode, CudaGraph.maker(), num_blocks=40)
    assert_alike(
        run_out(engine, lab.requests()), run_out(lab.plain_engine(decoder), lab.requests())
    )
    assert engine.statistics.num_preemptions > 0


def test_a_row_that_is_not_finite_ends_and_no_other_notices(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    decoder = lab.decoder()
    bad = 299
    whole = lab.requests(banned_token_ids=(bad,))
    expected = run_out(lab.plain_engine(decoder), whole)
    decoder.model.embed_tokens.weight[bad] = math.nan
    decoder.lm_head.weight[bad] = 0.0
    engine = lab.engine(decoder, paged_decode, CudaGraph.maker())
    broken = lab.requests(size=1, banned_token_ids=(bad,), forced_prefix=(bad,), max_tokens=3)[0]
    *found, last = run_out(engine, [*whole, broken])
    assert [rollout.finish_reason for rollout in last.rollouts] == ["error"]
    assert_alike(found, expected)


def test_a_graph_is_captured_while_another_thread_computes(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    done = threading.Event()

    def learn() -> None:
        while not done.is_set():
            size = int(torch.randint(1, 500, ()))
            (torch.randn(size, size, device="cuda") @ torch.randn(size, size, device="cuda")).sum()

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        decoder = lab.decoder()
        found = run_out(lab.engine(decoder, paged_decode, CudaGraph.maker()), lab.requests())
    finally:
        done.set()
        thread.join()
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))


def test_the_generator_chooses_the_device_s_own_runner(
    lab: CudaLab, paged_decode: PagedDecode
) -> None:
    assert paged_decode is not None
    decoder = lab.decoder()
    found = asyncio.run(generate(lab, decoder, lab.requests()))
    assert_alike(found, run_out(lab.plain_engine(decoder), lab.requests()))


def test_uniforms_of_the_device_are_the_processor_s_bits(lab: CudaLab) -> None:
    seeds = torch.randint(-(2**63), 2**63 - 1, (10_000,))
    positions = torch.arange(10_000)
    on_device = uniforms(seeds, positions, lab.device)
    assert torch.equal(on_device.cpu(), uniforms(seeds, positions, torch.device("cpu")))


async def generate(
    lab: CudaLab, decoder: Decoder, requests: Sequence[GenerationRequest]
) -> list[RolloutGroup]:
    compute = ComputeThread("generator", 1)
    generator = TorchGenerator(
        decoder.config,
        decode=str,
        compute=compute,
        device=lab.device,
        max_cache_bytes=1 << 24,
    )
    try:
        assert isinstance(generator._engine._engine._runner, CudaRunner)
        await generator.update_weights(lab.update(decoder))
        found = {group.group_id: group async for group in generator.generate(requests)}
    finally:
        await generator.close()
        compute.close(timeout_seconds=5.0)
    return [found[request.group_id] for request in requests]


def rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def gaps(
    decoder: Decoder, requests: Sequence[GenerationRequest], groups: Sequence[RolloutGroup]
) -> Tensor:
    """Differences between the log-probs recorded and those of full passes on the processor."""
    found = []
    for request, group in zip(requests, groups, strict=True):
        prompt = request.prompt.token_ids
        for rollout in group.rollouts:
            ids = torch.tensor([*prompt, *rollout.completion_ids])
            attention = PackedCausal([len(ids)], decoder.config.windows)
            hidden = decoder(ids, positions_of([len(ids)]), attention)[len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(decoder.logits(hidden), -1)
            expected = logprobs.gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)
            found.append((expected - torch.tensor(rollout.generator_logprobs)).abs())
    return torch.cat(found)
