"""Which requests the engine can serve at all, decided before anything is queued.

What is refused here would otherwise surface later as an index error in the middle of a batch, or
as a group that never becomes whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import GeneratorFailure
from headrace.models.decoder_config import DecoderConfig
from headrace.types import GenerationRequest


def check_requests(
    requests: Sequence[GenerationRequest], config: DecoderConfig, *, max_cached_tokens: int
) -> None:
    """Raise GeneratorFailure naming the first group that cannot be sampled, and why."""
    seen: set[str] = set()
    for request in requests:
        problem = _problem(request, config, max_cached_tokens)
        if request.group_id in seen:
            problem = "asked for twice in one call; give each group an id of its own"
        if problem:
            msg = f"group {request.group_id} (prompt {request.prompt.prompt_id}): {problem}"
            raise GeneratorFailure(msg)
        seen.add(request.group_id)


def _problem(
    request: GenerationRequest, config: DecoderConfig, max_cached_tokens: int
) -> str | None:
    sampling, ids = request.sampling, request.prompt.token_ids
    if request.group_size < 1:
        return f"group_size = {request.group_size} must be at least 1"
    if sampling.max_tokens < 1:
        return f"sampling.max_tokens = {sampling.max_tokens} must be at least 1"
    if not 0.0 <= sampling.temperature < float("inf"):
        return f"sampling.temperature = {sampling.temperature} must be 0 or a positive number"
    if not (min(ids) >= 0 and max(ids) < config.vocab_size):
        return (
            f"token ids {min(ids)} to {max(ids)} do not fit the vocabulary of "
            f"{config.vocab_size}; was it rendered by another model's tokenizer?"
        )
    return _too_long(len(ids), sampling.max_tokens, config.max_positions, max_cached_tokens)


def _too_long(prompt: int, completion: int, positions: int, cached: int) -> str | None:
    needed = f"{prompt} prompt tokens + sampling.max_tokens = {completion} exceed the"
    if prompt + completion > positions:
        return f"{needed} model's {positions} positions; lower max_tokens or drop the prompt"
    if prompt + completion > cached:
        return f"{needed} {cached} tokens that the cache holds; raise generator.max_cache_gib"
    return None
