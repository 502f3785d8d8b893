"""What a rollout asks of the engine, in vLLM's words."""

from __future__ import annotations

from typing import Any

from headrace.errors import GeneratorFailure
from headrace.types import GenerationRequest, SamplingParams


def check_request(request: GenerationRequest, max_model_len: int) -> None:
    """Raise GeneratorFailure for what vLLM cannot do; the recipe's checks say the same earlier."""
    sampling, group_id = request.sampling, request.group_id
    length = len(request.prompt.token_ids) + sampling.max_tokens
    if length > max_model_len:
        msg = (
            f"group {group_id}: prompt and sampling.max_tokens come to {length} tokens and "
            f"generator.vllm.max_model_len is {max_model_len}; raise it or lower max_tokens"
        )
        raise GeneratorFailure(msg)
    wanted = {
        "raw_logprobs": sampling.raw_logprobs,
        "kept_support": sampling.kept_support,
        "min_p together with top_p": sampling.min_p > 0.0 and sampling.top_p < 1.0,
    }
    if asked := [name for name, is_on in wanted.items() if is_on]:
        msg = (
            f"group {group_id}: {', '.join(asked)}: the vLLM engine cannot do this; use "
            'generator.engine = "torch"'
        )
        raise GeneratorFailure(msg)


def engine_params(sampling: SamplingParams, *, num_done: int, seed: int, vocab_size: int) -> Any:  # noqa: ANN401 - vLLM's own
    """Return vLLM's parameters for the rest of a rollout that has ``num_done`` tokens.

    Stop strings are not among them: they are looked for here, where tokens of before count too.
    """
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - as above

    from vllm import SamplingParams as EngineParams  # noqa: PLC0415 - imported where it runs

    return EngineParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens - num_done,
        min_tokens=max(0, sampling.min_tokens - num_done),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        allowed_token_ids=_allowed(sampling, vocab_size),
        seed=seed,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _allowed(sampling: SamplingParams, vocab_size: int) -> list[int] | None:
    """Return the ids that masks leave; None where there are no masks."""
    if sampling.allowed_token_ids is None and not sampling.banned_token_ids:
        return None
    allowed = sampling.allowed_token_ids
    return sorted(
        set(range(vocab_size) if allowed is None else allowed) - {*sampling.banned_token_ids}
    )
