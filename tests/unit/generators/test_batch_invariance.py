"""`batch_invariant`: the same bits alone and among others, whatever the engine does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine.forms import can_multiply_int8
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_engine.rollout_state import sampling_rows
from headrace.generators.torch_engine.sampling import draw
from headrace.models.decoder import Decoder
from headrace.types import GenerationRequest, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

Bits = dict[tuple[str, int], tuple[tuple[int, ...], tuple[float, ...]]]
"""Tokens and log-probs by group and rollout."""

BLOCK = 16
POSITIONS = 160
FAMILIES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", "sliding_window": 21},
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    {"model_type": "qwen3"},
]
WIDTHS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 4, "intermediate_size": 48, "head_dim": 64},
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 61},
    {"hidden_size": 64, "num_key_value_heads": 1, "intermediate_size": 1104, "vocab_size": 300},
]
DTYPES = (torch.float32, torch.bfloat16)


def workload(lab: Lab, seed: int, vocabulary: int) -> list[GenerationRequest]:
    """64 rollouts in groups of one to sixteen; some prompts begin alike, no two are the same."""
    source = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=source))

    def tokens(count: int) -> list[int]:
        return torch.randint(1, vocabulary, (count,), generator=source).tolist()

    common = tokens(40)
    kinds: list[dict[str, Any]] = [{}, {}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}]
    requests = []
    for index, size in enumerate((1, 16, 3, 1, 8, 2, 5, 1, 4, 7, 1, 9, 6)):
        own = tokens(whole(1, 50))
        ids = [*common[: whole(0, 41)], *own] if index % 2 else own
        kind = {"max_tokens": whole(1, 26), **kinds[whole(0, len(kinds))]}
        requests.append(lab.request(f"g{index}", ids, size=size, seed=whole(0, 99), **kind))
    assert sum(request.group_size for request in requests) == 64
    return requests


def bits(groups: dict[str, RolloutGroup]) -> Bits:
    return {
        (name, rollout.rollout_index): (rollout.completion_ids, rollout.generator_logprobs)
        for name, group in groups.items()
        for rollout in group.rollouts
    }


def assert_same(found: Bits, expected: Bits) -> None:
    for name, (ids, logprobs) in found.items():
        assert ids == expected[name][0], name
        assert torch.equal(torch.tensor(logprobs), torch.tensor(expected[name][1])), name


class Workbench:
    """One model, and generators of it that differ in what they have room for."""

    def __init__(self, lab: Lab, decoder: Decoder) -> None:
        self.lab, self.decoder = lab, decoder
        self.dtype = next(decoder.parameters()).dtype

    def run(
        self, *calls: Sequence[GenerationRequest], forgets: bool = True, **options: object
    ) -> tuple[list[Bits], dict[str, float]]:
        """Make ``calls`` of one generator, which forgets its cache between them if it should."""

        async def main() -> tuple[list[Bits], dict[str, float]]:
            generator = self.generator(**options)
            found = []
            for number, requests in enumerate(calls):
                if number == 0 or forgets:
                    await generator.update_weights(self.lab.update(self.decoder))
                found.append(bits(await self.lab.collect(generator, requests)))
            await generator.close()
            return found, dict(generator.metrics())

        return asyncio.run(main())

    def generator(self, **options: object) -> TorchGenerator:
        options = {"batch_invariant": True, "dtype": self.dtype, **options}
        return self.lab.generator(self.decoder.config, **options)

    def cache_of(self, num_blocks: int) -> int:
        return num_blocks * block_bytes(self.decoder.config, BLOCK, self.dtype)


def check(
    lab: Lab,
    family: dict[str, Any],
    width: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    part: int,
) -> None:
    """Sample one workload in many ways; ``part`` prompt tokens at a time in one of them."""
    decoder = lab.decoder(seed, **width, **family, max_position_embeddings=POSITIONS).to(dtype)
    bench, requests = Workbench(lab, decoder), workload(lab, seed, decoder.config.vocab_size)
    (together, backwards), _ = bench.run(requests, requests[::-1])
    assert_same(backwards, together)
    alone, _ = bench.run(*([request] for request in requests[::2]))
    for found in alone:
        assert_same(found, together)
    (parts,), _ = bench.run(requests, max_prefill_tokens=part)
    assert_same(parts, together)
    (few,), metrics = bench.run(
        requests, max_concurrent_rollouts=24, max_cache_bytes=bench.cache_of(16)
    )
    assert metrics["generator/engine/num_preemptions"] > 0
    assert_same(few, together)
    (_, again), metrics = bench.run(requests, requests, forgets=False)
    assert metrics["generator/cache/found_share"] > 0.2
    assert_same(again, together)


@pytest.mark.parametrize(
    ("family", "width", "dtype", "part"),
    [
        (FAMILIES[0], WIDTHS[0], torch.float32, 7),
        (FAMILIES[1], WIDTHS[1], torch.bfloat16, 16),
        (FAMILIES[2], WIDTHS[2], torch.float32, 1),
        (FAMILIES[3], WIDTHS[3], torch.bfloat16, 33),
        (FAMILIES[4], WIDTHS[3], torch.float32, 50),
    ],
)
def test_a_rollout_has_the_same_bits_alone_and_among_63_others_whatever_the_engine_does(
    lab: Lab, family: dict[str, Any], width: dict[str, Any], dtype: torch.dtype, part: int
) -> None:
    check(lab, family, width, dtype, seed=0, part=part)


@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    family=st.sampled_from(FAMILIES),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
    part=st.integers(1, 90),
)
def test_a_rollout_of_any_small_model_has_the_same_bits_alone_and_among_63_others(
    lab: Lab,
    family: dict[str, Any],
    width: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    part: int,
) -> None:
    check(lab, family, width, dtype, seed, part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_rollout_of_a_group_of_sixteen_is_that_of_a_group_of_one(
    lab: Lab, dtype: torch.dtype
) -> None:
    bench = Workbench(lab, lab.decoder(max_position_embeddings=POSITIONS).to(dtype))
    ids = list(range(1, 40))
    group, single = (lab.request("g", ids, size=size, max_tokens=50) for size in (16, 1))
    (of_group, of_single), _ = bench.run([group], [single])
    assert_same(of_single, of_group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_next_turn_that_finds_its_beginning_in_the_cache_has_the_bits_of_one_that_computes_it(
    lab: Lab, dtype: torch.dtype
) -> None:
    bench = Workbench(lab, lab.decoder(max_position_embeddings=POSITIONS).to(dtype))
    first = lab.request("g", list(range(1, 30)), max_tokens=50)
    (turn,), _ = bench.run([first])
    ids = [*first.prompt.token_ids, *turn["g", 0][0], 7, 8, 9]
    second = lab.request("h", ids, max_tokens=30)
    (_, found), metrics = bench.run([first], [second], forgets=False)
    assert metrics["generator/cache/found_share"] > 0.5
    (computed,), _ = bench.run([second])
    assert_same(found, computed)


@pytest.mark.parametrize(
    ("dtype", "is_quantized"),
    [(torch.float16, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_half_precision_and_eight_bits_keep_the_promise_too(
    lab: Lab, dtype: torch.dtype, *, is_quantized: bool
) -> None:
    if is_quantized and not can_multiply_int8(torch.device("cpu")):
        pytest.skip("this processor has no exact products of eight bits")
    decoder = lab.decoder(**WIDTHS[3], max_position_embeddings=POSITIONS).to(dtype)
    bench, requests = Workbench(lab, decoder), workload(lab, 6, 300)
    (together,), _ = bench.run(requests, is_quantized=is_quantized)
    alone, _ = bench.run(
        *([request] for request in requests[:4]), is_quantized=is_quantized, max_prefill_tokens=19
    )
    for found in alone:
        assert_same(found, together)


def test_two_threads_keep_the_promise_too(lab: Lab) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        decoder = lab.decoder(hidden_size=64, vocab_size=300, max_position_embeddings=POSITIONS)
        bench, requests = Workbench(lab, decoder), workload(lab, 5, 300)
        (together,), _ = bench.run(requests)
        alone, _ = bench.run(*([request] for request in requests[:6]))
    finally:
        torch.set_num_threads(num_threads)
    for found in alone:
        assert_same(found, together)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_one_full_forward_pass(lab: Lab, family: dict[str, Any]) -> None:
    decoder = lab.decoder(**family, max_position_embeddings=POSITIONS)
    requests = [
        lab.request("a", range(1, 46), size=3, max_tokens=60),
        lab.request("b", (5, 6), size=2, max_tokens=90),
    ]
    groups = lab.run(decoder, requests, batch_invariant=True, max_prefill_tokens=20)
    for request in requests:
        for rollout in groups[request.group_id].rollouts:
            assert lab.gap(decoder, request.prompt.token_ids, rollout) < 2e-5


@given(
    seed=st.integers(0, 2**16),
    vocabulary=st.sampled_from([3, 50, 256, 1000]),
    first=st.integers(0, 20),
    count=st.integers(1, 12),
)
@settings(deadline=None)
def test_drawing_depends_on_the_row_alone(
    seed: int, vocabulary: int, first: int, count: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_k=5, kept_support=True),
        SamplingParams(top_p=0.8, min_p=0.01, raw_logprobs=True),
    ]
    params = [kinds[index % 4] for index in range(32)]
    forbidden = torch.rand(32, vocabulary, generator=source) < 0.3
    forbidden[:, 0] = False
    logits = torch.randn(32, vocabulary, generator=source) * 4
    uniform = torch.rand(32, generator=source, dtype=torch.float64)
    together = draw(logits.clone(), sampling_rows(params), uniform, forbidden)
    rows = slice(first, first + count)
    found = draw(logits[rows].clone(), sampling_rows(params[rows]), uniform[rows], forbidden[rows])
    assert torch.equal(found.ids, together.ids[rows])
    assert torch.equal(found.logprobs, together.logprobs[rows])
    if found.raw_logprobs is not None and together.raw_logprobs is not None:
        asked = [row for row in range(count) if params[first + row].raw_logprobs]
        assert torch.equal(found.raw_logprobs[asked], together.raw_logprobs[rows][asked])
    for row, support in found.kept_support.items():
        assert support == together.kept_support[first + row]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ({"head_dim": 16}, torch.float32),
        ({"intermediate_size": 24}, torch.float32),
        ({"hidden_size": 24}, torch.float32),
        ({}, torch.float64),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    lab: Lab, shape: dict[str, Any], dtype: torch.dtype
) -> None:
    with pytest.raises(ConfigError, match=r"generator\.batch_invariant = true.*multiples of 16"):
        lab.generator(lab.config(**shape), dtype=dtype, batch_invariant=True)
