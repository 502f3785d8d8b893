"""What SGLang can sample as headrace means it, whatever the server.

SGLang reports ``log_softmax(logits / temperature)`` after masks and before top-k and min-p
(`Sampler.forward` of 0.5.23), and the log-prob among the kept tokens only where it is asked for
them, which needs a finite ``top_k``. Whatever would be sampled or reported as something else is
refused, with the recipe and again with a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from headrace.types import SamplingParams

KeyRefusal: TypeAlias = tuple[tuple[str, ...], str]
"""The keys of a sampling section that it rests on, and why SGLang cannot do it."""

MAX_STOP_STRINGS = 32
"""As many as SGLang takes."""


def is_api_key(text: str) -> bool:
    """Whether an HTTP header takes ``text`` as a key: visible ASCII characters, one at least."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def is_point(sampling: SamplingParams) -> bool:
    """Whether every token is the most probable one: its log-prob is 0, whatever SGLang reports."""
    return sampling.temperature == 0.0 or sampling.top_k == 1


def asks_support(sampling: SamplingParams) -> bool:
    """Whether SGLang must report the kept tokens: only with them come log-probs among them."""
    return sampling.truncates and not is_point(sampling)


def sglang_refusals(sampling: SamplingParams) -> Iterator[KeyRefusal]:
    """Yield why SGLang cannot sample this."""
    if sampling.top_p < 1.0 and not is_point(sampling):
        text = (
            f"= {sampling.top_p:g}: SGLang reports log-probs among the kept tokens only with top_k "
            "as well, and then takes top_p of the whole distribution instead of what top_k left; "
            "use top_k, or min_p with top_k"
        )
        yield ("top_p",), text
    if sampling.min_p > 0.0 and sampling.top_k < 1 and not is_point(sampling):
        text = (
            f"= {sampling.min_p:g} without top_k: SGLang reports log-probs among the kept tokens "
            "only with a finite top_k; set top_k too, at most the servers' "
            "--sampling-mask-max-tokens (4096 unless set)"
        )
        yield ("min_p", "top_k"), text
    if (count := len(sampling.stop_strings)) > MAX_STOP_STRINGS:
        yield ("stop_strings",), f"with {count} strings: SGLang takes {MAX_STOP_STRINGS}"
    yield from _mask_refusals(sampling)


def _mask_refusals(sampling: SamplingParams) -> Iterator[KeyRefusal]:
    if sampling.allowed_token_ids is not None:
        text = "is set: SGLang has no mask of allowed ids; leave it out or list banned_token_ids"
        yield ("allowed_token_ids",), text
    if sampling.min_tokens and sampling.stop_strings:
        text = (
            f"= {sampling.min_tokens} with stop_strings: SGLang heeds stop strings from the first "
            "token on; leave one of them out"
        )
        yield ("min_tokens", "stop_strings"), text
    masks = sampling.masks or sampling.min_tokens > 0
    if sampling.raw_logprobs and (sampling.temperature not in {0.0, 1.0} or masks):
        text = (
            "= true: SGLang reports them only at temperature 0 or 1 and without min_tokens and "
            "banned_token_ids; leave it out"
        )
        yield ("raw_logprobs",), text
