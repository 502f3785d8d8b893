"""What an engine cannot honour is refused with the recipe, in words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config import parse_config
from headrace.errors import ConfigError

RECIPE: dict[str, Any] = {
    "num_steps": 1,
    "model": {"path": "nano"},
    "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
    "verifier": {"components": {"answer": {"kind": "exact"}}},
}


def refusal(**settings: Any) -> str:  # noqa: ANN401 - whatever a recipe can hold
    with pytest.raises(ConfigError) as caught:
        parse_config(RECIPE | settings)
    (line,) = caught.value.problems
    return line


def test_options_of_vllm_are_refused_where_another_engine_samples() -> None:
    line = refusal(generator={"vllm": {"block_size": 64}})
    assert line.startswith('generator.vllm with generator.engine = "torch": nothing reads')


def test_options_of_vllm_at_their_defaults_are_no_fault() -> None:
    parse_config(RECIPE | {"generator": {"vllm": {"block_size": 32}}})


@pytest.mark.parametrize("section", ["sampling", "eval"])
def test_a_temperature_that_vllm_would_raise_is_refused(section: str) -> None:
    sampling = {"temperature": 0.001}
    settings = {"sampling": sampling} if section == "sampling" else {"eval": {"sampling": sampling}}
    line = refusal(generator={"engine": "vllm"}, **settings)
    assert "sampling.temperature = 0.001" in line
    assert "vLLM would sample at 0.01 instead" in line


def test_filters_that_vllm_applies_in_another_order_are_refused_together() -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": {"engine": "vllm"}}
    line = refusal(sampling={"min_p": 0.1, "top_p": 0.9}, **settings)
    assert line.startswith("sampling.min_p with sampling.top_p")
    for alone in ({"min_p": 0.1, "top_k": 5}, {"top_p": 0.9, "top_k": 5}):
        parse_config(RECIPE | settings | {"sampling": alone})


@pytest.mark.parametrize("name", ["raw_logprobs", "kept_support"])
def test_records_that_vllm_cannot_give_are_refused(name: str) -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": {"engine": "vllm"}}
    line = refusal(sampling={name: True, "top_p": 0.9}, **settings)
    assert line.startswith(f'sampling.{name} = true with generator.engine = "vllm"')


def test_the_torch_engine_takes_all_of_them() -> None:
    sampling = {"min_p": 0.1, "top_p": 0.9, "temperature": 0.001}
    parse_config(RECIPE | {"objective": {"proximal": "recompute"}, "sampling": sampling})


SERVERS = {"urls": ["http://one:30000", "http://two:30000"]}


def sglang(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever a recipe can hold
    return {"engine": "sglang", "sglang": SERVERS | options}


def test_sglang_needs_to_be_told_where_its_servers_are() -> None:
    line = refusal(generator={"engine": "sglang"})
    assert 'give the servers as generator.sglang.urls = ["http://HOST:PORT", ...]' in line
    parse_config(RECIPE | {"generator": sglang()})


@pytest.mark.parametrize(
    "url",
    [
        "one:30000",
        "ftp://one:1",
        "http://",
        "http://one:1/v1",
        "http://one?a=b",
        "http://a:b@one:1",
        "http://one:99999",
        "http://one:0",
        "http://one:x",
        "http://one two:1",
        "http://[::1:1",
        "http://a,b:1",
    ],
)
def test_an_address_that_is_no_server_is_refused(url: str) -> None:
    line = refusal(generator={"engine": "sglang", "sglang": {"urls": [url]}})
    assert "generator.sglang.urls" in line
    assert "give http://HOST:PORT or https://HOST:PORT and nothing after it" in line


def test_one_server_is_not_given_twice() -> None:
    for other in ("http://one:1/", "HTTP://One:1", "http://one:01"):
        twice = {"urls": ["http://one:1", other]}
        line = refusal(generator={"engine": "sglang", "sglang": twice})
        assert "http://one:1 more than once" in line
    address = parse_config(RECIPE | {"generator": sglang(urls=["http://[::1]:1/"])})
    assert address.generator.sglang.urls == ("http://[::1]:1",)


def test_options_of_sglang_are_refused_where_another_engine_samples() -> None:
    line = refusal(generator={"sglang": SERVERS})
    assert line.startswith('generator.sglang with generator.engine = "torch": nothing reads')


@pytest.mark.parametrize("setting", [{"max_cache_gib": 2.0}, {"max_prefill_tokens": 64}])
def test_what_sglangs_servers_decide_themselves_is_refused(setting: dict[str, Any]) -> None:
    (key,) = setting
    line = refusal(generator=sglang() | setting)
    assert line.startswith(f'generator.{key} with generator.engine = "sglang"')


def test_the_directory_of_weights_has_one_name_for_all() -> None:
    line = refusal(generator=sglang(weights_directory="weights"))
    assert "generator.sglang.weights_directory = weights" in line
    assert "give an absolute path" in line


@pytest.mark.parametrize(
    ("sampling", "start"),
    [
        ({"top_p": 0.9}, "top_p = 0.9: SGLang reports log-probs"),
        ({"min_p": 0.1}, "min_p = 0.1 without top_k: SGLang"),
        ({"allowed_token_ids": [5, 6]}, "allowed_token_ids is set: SGLang has no mask"),
        ({"min_tokens": 2, "stop_strings": ["A"]}, "min_tokens = 2 with stop_strings: SGLang"),
        ({"raw_logprobs": True, "min_tokens": 2}, "raw_logprobs = true: SGLang reports them only"),
        ({"raw_logprobs": True, "temperature": 0.5}, "raw_logprobs = true: SGLang"),
    ],
)
@pytest.mark.parametrize("section", ["sampling", "eval"])
def test_what_sglang_would_sample_or_report_as_something_else_is_refused(
    section: str, sampling: dict[str, Any], start: str
) -> None:
    settings = {"sampling": sampling} if section == "sampling" else {"eval": {"sampling": sampling}}
    settings |= {"objective": {"proximal": "recompute"}}
    line = refusal(generator=sglang(), **settings)
    assert line.startswith("sampling." if section == "sampling" else "eval.sampling.")
    assert start in line


def test_sglang_takes_top_k_and_min_p_with_it_and_any_filter_when_greedy() -> None:
    settings = {"objective": {"proximal": "recompute"}, "generator": sglang()}
    for sampling in ({"top_k": 40}, {"top_k": 40, "min_p": 0.1}):
        parse_config(RECIPE | settings | {"sampling": sampling})
    greedy = {"temperature": 0.0, "top_p": 0.5}
    parse_config(RECIPE | settings | {"eval": {"sampling": greedy}})


@pytest.mark.parametrize("engine", [{"engine": "vllm"}, sglang()])
def test_weights_of_eight_bits_are_refused_where_another_engine_samples(
    engine: dict[str, object],
) -> None:
    line = refusal(generator={**engine, "dtype": "int8"})
    assert line.startswith(f'generator.dtype = "int8" with generator.engine = "{engine["engine"]}"')


def test_batch_invariance_is_refused_where_the_engine_has_no_such_mode() -> None:
    settings = {"objective": {"proximal": "recompute"}}
    line = refusal(generator={"engine": "vllm", "batch_invariant": True}, **settings)
    assert line.startswith('generator.batch_invariant = true with generator.engine = "vllm"')
    parse_config(RECIPE | {"generator": {"batch_invariant": True}})
