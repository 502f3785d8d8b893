"""Which requests an engine can serve at all, decided before anything is queued.

What is refused here would otherwise surface later as an index error in the middle of a batch, or
as a group that never becomes whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from headrace.errors import GeneratorFailure
from headrace.models.foreign_config import PolicyLimits
from headrace.types import LEAST_TEMPERATURE, GenerationRequest, Rollout, SamplingParams


def check_requests(
    requests: Sequence[GenerationRequest],
    config: PolicyLimits,
    *,
    max_cached_tokens: int | None = None,
) -> None:
    """Raise GeneratorFailure naming the first group that cannot be sampled, and why.

    ``max_cached_tokens`` is what a cache holds in which every rollout must fit; None knows of none.
    """
    seen: set[str] = set()
    # Masks may be as long as the vocabulary, and mostly all requests have one params object.
    params = {id(request.sampling): request.sampling for request in requests}
    faults = {key: next(_faults(param, config.vocab_size), None) for key, param in params.items()}
    for request in requests:
        problem = faults[id(request.sampling)] or _problem(request, config, max_cached_tokens)
        if request.group_id in seen:
            problem = "asked for twice in one call; give each group an id of its own"
        if problem:
            msg = f"group {request.group_id} (prompt {request.prompt.prompt_id}): {problem}"
            raise GeneratorFailure(msg)
        seen.add(request.group_id)


def _faults(sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    """Say what no request can ask for."""
    if sampling.max_tokens < 1:
        yield f"sampling.max_tokens = {sampling.max_tokens} must be at least 1"
    if sampling.temperature and not LEAST_TEMPERATURE <= sampling.temperature < float("inf"):
        yield (
            f"sampling.temperature = {sampling.temperature} must be 0 or a number from "
            f"{LEAST_TEMPERATURE} on"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        yield f"sampling.top_p = {sampling.top_p} must be above 0 and at most 1"
    if sampling.top_k < 0:
        yield f"sampling.top_k = {sampling.top_k} must be 0 or a positive number"
    if not 0.0 <= sampling.min_p <= 1.0:
        yield f"sampling.min_p = {sampling.min_p} must be from 0 to 1"
    for name in ("allowed_token_ids", "banned_token_ids", "forced_prefix"):
        beyond = [token for token in getattr(sampling, name) or () if token >= vocab_size]
        if beyond:
            yield f"sampling.{name} = {beyond}: the model's ids end at {vocab_size - 1}"
    if len(sampling.early_banned.intersection(range(vocab_size))) == vocab_size:
        yield "sampling.banned_token_ids and the stop ids before min_tokens leave no token"


def _problem(
    request: GenerationRequest, config: PolicyLimits, max_cached_tokens: int | None
) -> str | None:
    sampling, ids = request.sampling, request.prompt.token_ids
    if request.group_size < 1:
        return f"group_size = {request.group_size} must be at least 1"
    if not (min(ids) >= 0 and max(ids) < config.vocab_size):
        return (
            f"token ids {min(ids)} to {max(ids)} do not fit the vocabulary of "
            f"{config.vocab_size}; was it rendered by another model's tokenizer?"
        )
    for rollout in request.begun:
        for misfit in _misfits(rollout, sampling, config.vocab_size):
            return f"begun rollout {rollout.rollout_index} {misfit}"
    return _too_long(len(ids), sampling.max_tokens, config.max_positions, max_cached_tokens)


def _misfits(rollout: Rollout, sampling: SamplingParams, vocab_size: int) -> Iterator[str]:
    """Say in what way ``rollout`` is none of ``sampling``, or nothing that the model sampled."""
    ids, prefix = rollout.completion_ids, sampling.forced_prefix
    if len(ids) > sampling.max_tokens:
        yield (
            f"has {len(ids)} tokens, more than sampling.max_tokens = {sampling.max_tokens}; "
            "raise it or leave the rollout out, which starts it at the prompt"
        )
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        yield (
            f"holds token ids {min(ids)} to {max(ids)}, which do not fit the vocabulary of "
            f"{vocab_size}; was it sampled by another model?"
        )
    if not all(map(math.isfinite, rollout.generator_logprobs)):
        yield "holds log-probs that are not finite; leave it out, which starts it at the prompt"
    if not rollout.may_go_on or not ids:
        return
    if ids[: len(prefix)] != prefix:
        yield f"begins with {ids[: len(prefix)]} and not with sampling.forced_prefix = {prefix}"
    if sampling.raw_logprobs and rollout.raw_logprobs is None:
        yield "has no raw_logprobs, which sampling.raw_logprobs asks for"
    if sampling.records_support and rollout.kept_support is None:
        yield "has no kept_support, which sampling.kept_support asks for"


def _too_long(prompt: int, completion: int, positions: int, cached: int | None) -> str | None:
    needed = f"{prompt} prompt tokens + sampling.max_tokens = {completion} exceed the"
    if prompt + completion > positions:
        return f"{needed} model's {positions} positions; lower max_tokens or drop the prompt"
    if cached is not None and prompt + completion > cached:
        return f"{needed} {cached} tokens that the cache holds; raise generator.max_cache_gib"
    return None
