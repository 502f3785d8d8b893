"""What SGLang can sample as headrace means it, and the request that says so.

Owns the promise that ``generator_logprobs`` are those of the distribution sampled from. SGLang
reports ``log_softmax(logits / temperature)`` after masks and before top-k, top-p and min-p
(`Sampler.forward` of 0.5.23), and the log-prob among the kept tokens only where it is asked for the
kept tokens and ``top_k`` is finite. Whatever would be reported as something else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.generators.sglang.facts import ServerFacts
from headrace.types import SamplingParams

GREEDY_BELOW = 1e-6
"""SGLang takes a temperature below this for 0."""
MAX_STOP_STRINGS = 32
"""As many as SGLang takes."""
BAN = -1e9
"""Added to a banned token's logit: its probability is 0 in every float format. Finite, because JSON
has no infinity."""


def is_point(sampling: SamplingParams) -> bool:
    """Whether every token is the most probable one: its log-prob is 0, whatever SGLang reports."""
    return sampling.temperature == 0.0 or sampling.top_k == 1


def asks_support(sampling: SamplingParams) -> bool:
    """Whether SGLang must report the kept tokens: only with them come log-probs among them."""
    return sampling.truncates and not is_point(sampling)


def unsupported_sampling(sampling: SamplingParams) -> Iterator[str]:
    """Yield why SGLang cannot sample this, whatever the server; each line names its key."""
    temperature = sampling.temperature
    if 0.0 < temperature < GREEDY_BELOW:
        yield f"temperature = {temperature}: SGLang takes it for 0; set 0 or at least 1e-6"
    if asks_support(sampling) and sampling.top_k < 1:
        yield (
            f"top_p = {sampling.top_p}, min_p = {sampling.min_p} without top_k: SGLang reports "
            "log-probs among the kept tokens only with a finite top_k; set top_k too, at most "
            "the servers' --sampling-mask-max-tokens (4096 unless set)"
        )
    if sampling.allowed_token_ids is not None:
        yield (
            "allowed_token_ids: SGLang has no mask of allowed ids; leave it out or list "
            "banned_token_ids"
        )
    if sampling.min_tokens and sampling.stop_strings:
        yield "min_tokens with stop_strings: SGLang heeds stop strings from the first token on"
    if len(sampling.stop_strings) > MAX_STOP_STRINGS:
        yield f"stop_strings: SGLang takes {MAX_STOP_STRINGS}, not {len(sampling.stop_strings)}"
    if sampling.raw_logprobs and (temperature not in {0.0, 1.0} or sampling.masks):
        yield (
            "raw_logprobs: SGLang reports them only at temperature 0 or 1, without min_tokens, "
            "banned_token_ids and allowed_token_ids"
        )


def unsupported_by(facts: ServerFacts, sampling: SamplingParams) -> Iterator[str]:
    """Yield why a server launched like this cannot sample it."""
    if asks_support(sampling) and sampling.top_k > facts.max_support:
        yield (
            f"top_k = {sampling.top_k} exceeds its --sampling-mask-max-tokens = "
            f"{facts.max_support}; lower top_k or raise that"
        )
    if asks_support(sampling) and sampling.min_p > 0.0 and facts.is_deterministic:
        yield (
            f"min_p = {sampling.min_p}: SGLang ends on it with --enable-deterministic-inference; "
            "leave one of them out"
        )
    if (sampling.stop_strings or sampling.min_tokens) and not facts.has_tokenizer:
        yield "stop_strings and min_tokens: it was launched with --skip-tokenizer-init"


def wire_sampling(sampling: SamplingParams, *, num_begun: int, seed: int) -> dict[str, object]:
    """Return the ``sampling_params`` of a rollout that has ``num_begun`` tokens already.

    Seeds count positions from the prompt's start, so a rollout that goes on draws the tokens that
    an uninterrupted one would have drawn.
    """
    found: dict[str, object] = {
        "max_new_tokens": sampling.max_tokens - num_begun,
        "temperature": 0.0 if is_point(sampling) else sampling.temperature,
        "sampling_seed": seed,
        "skip_special_tokens": True,
        "no_stop_trim": True,
    }
    if asks_support(sampling):
        found |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.stop_token_ids:
        found["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop_strings:
        found["stop"] = list(sampling.stop_strings)
    if sampling.min_tokens > num_begun:
        found["min_new_tokens"] = sampling.min_tokens - num_begun
    if sampling.banned_token_ids:
        found["logit_bias"] = {str(token): BAN for token in sampling.banned_token_ids}
    return found
