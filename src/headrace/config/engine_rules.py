"""Which settings each engine can honour: what only one of them reads, and what one cannot do.

An engine that would quietly sample from another distribution than the one asked for is refused
before anything starts. Judges settings alone; whether an engine is installed is preflight's
business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias, assert_never

from headrace.config.generator import GeneratorConfig, SamplingConfig, SGLangConfig, VllmConfig
from headrace.config.sglang_rules import sglang_refusals

Refusal: TypeAlias = tuple[tuple[str, ...], str]
"""The dotted keys it rests on, and one line: keys, values, why not, and what to do."""

VLLM_LEAST_TEMPERATURE = 0.01
"""vLLM raises every smaller temperature but 0 to this one."""


def engine_refusals(
    generator: GeneratorConfig, sampling: Mapping[str, SamplingConfig]
) -> Iterator[Refusal]:
    """Yield what ``generator.engine`` cannot do; ``sampling`` is by the name of its section."""
    yield from _unread_sections(generator)
    yield from _eight_bits(generator)
    yield from _invariance(generator)
    yield from _staging(generator)
    match generator.engine:
        case "torch":
            pass
        case "vllm":
            for section, config in sampling.items():
                yield from _vllm_sampling(section, config)
        case "sglang":
            yield from _sglang_servers(generator)
            for section, config in sampling.items():
                yield from _sglang_sampling(section, config)
        case _:
            assert_never(generator.engine)


def _unread_sections(generator: GeneratorConfig) -> Iterator[Refusal]:
    if generator.engine != "vllm" and generator.vllm != VllmConfig():
        text = (
            f'generator.vllm with generator.engine = "{generator.engine}": nothing reads this '
            'section; remove it or set generator.engine = "vllm"'
        )
        yield ("generator.vllm", "generator.engine"), text
    if generator.engine != "sglang" and generator.sglang != SGLangConfig():
        text = (
            f'generator.sglang with generator.engine = "{generator.engine}": nothing reads this '
            'section; remove it or set generator.engine = "sglang"'
        )
        yield ("generator.sglang", "generator.engine"), text


def _eight_bits(generator: GeneratorConfig) -> Iterator[Refusal]:
    if generator.engine != "torch" and generator.dtype == "int8":
        text = (
            f'generator.dtype = "int8" with generator.engine = "{generator.engine}": only the '
            'torch engine quantises weights at each update; use "bfloat16", or generator.engine = '
            '"torch"'
        )
        yield ("generator.dtype", "generator.engine"), text


def _invariance(generator: GeneratorConfig) -> Iterator[Refusal]:
    if generator.batch_invariant and generator.engine != "torch":
        text = (
            f'generator.batch_invariant = true with generator.engine = "{generator.engine}": only '
            'the engine "torch" has this mode; set generator.batch_invariant = false or '
            'generator.engine = "torch"'
        )
        yield ("generator.batch_invariant", "generator.engine"), text


def _staging(generator: GeneratorConfig) -> Iterator[Refusal]:
    if generator.staged_updates and generator.engine != "torch":
        text = (
            f'generator.staged_updates = true with generator.engine = "{generator.engine}": only '
            'the engine "torch" prepares weights beside those at work; set it to false or '
            'generator.engine = "torch"'
        )
        yield ("generator.staged_updates", "generator.engine"), text


def _vllm_sampling(section: str, sampling: SamplingConfig) -> Iterator[Refusal]:
    engine = 'generator.engine = "vllm"'
    if 0.0 < sampling.temperature < VLLM_LEAST_TEMPERATURE:
        text = (
            f"{section}.temperature = {sampling.temperature:g} with {engine}: vLLM would sample "
            f"at {VLLM_LEAST_TEMPERATURE} instead; use 0, or at least {VLLM_LEAST_TEMPERATURE}"
        )
        yield (f"{section}.temperature", "generator.engine"), text
    if sampling.min_p > 0.0 and sampling.top_p < 1.0:
        text = (
            f"{section}.min_p with {section}.top_p and {engine}: vLLM filters by min_p before "
            "top_p and headrace after it, which keeps other tokens; use one of the two, or "
            'generator.engine = "torch"'
        )
        yield (f"{section}.min_p", f"{section}.top_p", "generator.engine"), text
    for name in ("raw_logprobs", "kept_support"):
        if getattr(sampling, name):
            text = (
                f"{section}.{name} = true with {engine}: vLLM reports neither beside the log-probs "
                'of what it sampled; leave it out or use generator.engine = "torch"'
            )
            yield (f"{section}.{name}", "generator.engine"), text


def _sglang_servers(generator: GeneratorConfig) -> Iterator[Refusal]:
    """Judge what says where the servers are, and what only they decide."""
    engine, config = 'generator.engine = "sglang"', generator.sglang
    if not config.urls:
        text = f'{engine}: give the servers as generator.sglang.urls = ["http://HOST:PORT", ...]'
        yield ("generator.sglang.urls", "generator.engine"), text
    twice = sorted({url for url in config.urls if config.urls.count(url) > 1})
    if twice:
        text = f"generator.sglang.urls: {', '.join(twice)} more than once; give each server once"
        yield ("generator.sglang.urls",), text
    if config.weights_directory is not None and not config.weights_directory.is_absolute():
        text = (
            f"generator.sglang.weights_directory = {config.weights_directory}: the servers read it "
            "under the same name, so give an absolute path"
        )
        yield ("generator.sglang.weights_directory",), text
    defaults = GeneratorConfig()
    for key in ("max_cache_gib", "max_prefill_tokens"):
        if getattr(generator, key) != getattr(defaults, key):
            text = f"generator.{key} with {engine}: the servers decide that themselves; remove it"
            yield (f"generator.{key}", "generator.engine"), text


def _sglang_sampling(section: str, sampling: SamplingConfig) -> Iterator[Refusal]:
    for keys, why in sglang_refusals(sampling.params(())):
        text = f'{section}.{keys[0]} {why}, or generator.engine = "torch"'
        yield (*(f"{section}.{key}" for key in keys), "generator.engine"), text
