"""What a server can sample as it was launched, and the request that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.sglang_rules import asks_support, is_point
from headrace.generators.sglang.facts import ServerFacts
from headrace.types import SamplingParams

BAN = -1e9
"""Added to a banned token's logit: its probability is 0 in every float format. Finite, because JSON
has no infinity."""
ALL_TOKENS = -1
"""SGLang's ``top_k`` that keeps all."""


def unsupported_by(facts: ServerFacts, sampling: SamplingParams, num_prompt: int) -> Iterator[str]:
    """Yield why a server launched like this cannot sample it after ``num_prompt`` tokens."""
    if asks_support(sampling) and sampling.top_k > facts.max_support:
        yield (
            f"sampling.top_k = {sampling.top_k} exceeds its --sampling-mask-max-tokens = "
            f"{facts.max_support}; lower top_k or raise that"
        )
    if asks_support(sampling) and sampling.min_p > 0.0 and facts.is_deterministic:
        yield (
            f"sampling.min_p = {sampling.min_p:g}: SGLang's scheduler dies of it with "
            "--enable-deterministic-inference; leave one of them out"
        )
    if (sampling.stop_strings or sampling.min_tokens) and not facts.has_tokenizer:
        yield "stop_strings and min_tokens: it was launched with --skip-tokenizer-init"
    if facts.max_tokens is not None and num_prompt + sampling.max_tokens > facts.max_tokens:
        yield (
            f"{num_prompt} prompt tokens + sampling.max_tokens = {sampling.max_tokens} exceed the "
            f"{facts.max_tokens} tokens it takes; lower max_tokens or raise its --context-length"
        )


def wire_sampling(sampling: SamplingParams, *, num_begun: int, seed: int) -> dict[str, object]:
    """Return the ``sampling_params`` of a rollout that has ``num_begun`` tokens already.

    SGLang draws by seed and position in the sequence, so a rollout that goes on draws the tokens
    that an uninterrupted one would have drawn.
    """
    filters = asks_support(sampling)
    found: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens - num_begun,
        "min_new_tokens": max(0, sampling.min_tokens - num_begun),
        "temperature": 0.0 if is_point(sampling) else sampling.temperature,
        "top_k": sampling.top_k if filters else ALL_TOKENS,
        "top_p": 1.0,
        "min_p": sampling.min_p if filters else 0.0,
        "sampling_seed": seed,
    }
    if sampling.stop_token_ids:
        found["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        found["stop"] = list(sampling.stop_strings)
    if sampling.banned_token_ids:
        found["logit_bias"] = {str(token): BAN for token in sampling.banned_token_ids}
    return found
