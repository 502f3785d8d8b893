"""Which requests the engine can serve at all, decided before anything is queued.

What is refused here would otherwise surface later as an index error in the middle of a batch, or
as a group that never becomes whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import GeneratorFailure
from headrace.models.decoder_config import DecoderConfig
from headrace.types import GenerationRequest


def check_requests(requests: Sequence[GenerationRequest], config: DecoderConfig) -> None:
    """Raise GeneratorFailure naming the first group that cannot be sampled, and why."""
    seen: set[str] = set()
    for request in requests:
        problem = _problem(request, config)
        if request.group_id in seen:
            problem = "asked for twice in one call; give each group an id of its own"
        if problem:
            msg = f"group {request.group_id} (prompt {request.prompt.prompt_id}): {problem}"
            raise GeneratorFailure(msg)
        seen.add(request.group_id)


def _problem(request: GenerationRequest, config: DecoderConfig) -> str | None:
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
    if len(ids) + sampling.max_tokens > config.max_positions:
        return (
            f"{len(ids)} prompt tokens + sampling.max_tokens = {sampling.max_tokens} exceed the "
            f"model's {config.max_positions} positions; lower max_tokens or drop the prompt"
        )
    return None
