"""Reading what ``/generate`` answers: strictly, because it is what will be trained on.

Every token has its log-prob, its own id beside it, and the version that sampled it, or the reply is
refused as a whole. Nothing is filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.generators.sglang.client import ServerRefused
from headrace.types import FinishReason

NOT_FINITE = "NaN happened"
"""What SGLang says it matched when a sampled id lies outside the vocabulary."""
_MASK, _MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one ``/generate`` was asked, as far as the reply is checked against it."""

    url: str
    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    reports_support: bool
    """Whether the kept tokens were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one ``/generate`` has sampled: n tokens and why it ended."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """[n] as SGLang reports them without being asked for the kept tokens; nats."""
    policy_versions: tuple[int, ...] = ()
    support: tuple[tuple[int, ...], ...] | None = None
    """[n] ids that each token was drawn from; None unless asked for."""
    support_logprobs: tuple[float, ...] | None = None
    """[n] of the tokens among ``support``; None unless asked for."""
    finish_reason: FinishReason = "abort"
    num_cached: int = 0
    """Prompt tokens that the server found in its cache."""


def read_reply(reply: Mapping[str, Any], call: Call, versions: Mapping[str, int]) -> Sampled:
    """Return what ``reply`` holds. ``versions`` maps the names of versions that were published.

    Raises ServerRefused, naming the server and what does not fit.
    """
    try:
        return _read(reply, call, versions)
    except _Unfit as unfit:
        msg = f"{call.url}/generate: {unfit}; is this SGLang 0.5.23 or one that answers alike?"
        raise ServerRefused(msg) from unfit


class _Unfit(Exception):
    """One thing that does not fit."""


def _read(reply: Mapping[str, Any], call: Call, versions: Mapping[str, int]) -> Sampled:
    meta = _get(reply, "meta_info", dict)
    token_ids = _ids(_get(reply, "output_ids", list))
    if meta.get("id", call.rid) != call.rid:
        msg = f"it answers request {meta['id']} instead of {call.rid}"
        raise _Unfit(msg)
    finish_reason = _finish_reason(_get(meta, "finish_reason", dict), token_ids, call)
    prompt_tokens = meta.get("prompt_tokens", len(call.input_ids))
    if prompt_tokens != len(call.input_ids):
        msg = f"it read {prompt_tokens} of the {len(call.input_ids)} input tokens it was sent"
        raise _Unfit(msg)
    total = len(token_ids)
    if call.reports_support and finish_reason == "abort" and _MASK not in meta:
        total = 0  # tokens without their kept ids are of no use
    # The last "token" of an error is none: SGLang puts a stop id in its place.
    count = total - (finish_reason == "error")
    support, support_logprobs = (None, None)
    if call.reports_support:
        support, support_logprobs = _support(meta, total, count)
    return Sampled(
        token_ids=token_ids[:count],
        logprobs=_logprobs(meta, token_ids[:total], count),
        policy_versions=tuple(_versions(meta, count, versions)),
        support=support,
        support_logprobs=support_logprobs,
        finish_reason=finish_reason,
        num_cached=_whole(meta.get("cached_tokens", 0), "cached_tokens"),
    )


def _finish_reason(reason: Mapping[str, Any], token_ids: Sequence[int], call: Call) -> FinishReason:
    """Map the server's reason; one that was not asked for is no end of a rollout."""
    kind, matched = reason.get("type"), reason.get("matched")
    if len(token_ids) > call.max_new_tokens:
        msg = f"{len(token_ids)} tokens, where max_new_tokens was {call.max_new_tokens}"
        raise _Unfit(msg)
    match kind:
        case "abort":
            return "abort"
        case "stop" if matched == NOT_FINITE and token_ids:
            return "error"
        case "stop" if matched in call.stop_strings:
            return "stop"
        case "stop" if token_ids and matched == token_ids[-1] and matched in call.stop_token_ids:
            return "stop"
        case "stop":
            msg = (
                f"it stopped at {matched!r}, which is no stop id or string of this run; give both "
                "sides a model that names the same end-of-sequence ids, or add it to "
                "sampling.stop_token_ids"
            )
            raise _Unfit(msg)
        case "length" if len(token_ids) == call.max_new_tokens:
            return "length"
        case "length":
            msg = (
                f"it cut the completion at {len(token_ids)} of {call.max_new_tokens} tokens; lower "
                "sampling.max_tokens or give the server a longer context"
            )
            raise _Unfit(msg)
        case _:
            msg = f"finish_reason {reason} is none of stop, length and abort"
            raise _Unfit(msg)


def _logprobs(meta: Mapping[str, Any], token_ids: Sequence[int], count: int) -> tuple[float, ...]:
    """Return the log-probs of the first ``count``. Without tokens there may be one all the same."""
    if not token_ids:
        return ()
    entries = _get(meta, "output_token_logprobs", list)
    if len(entries) != len(token_ids):
        msg = f"{len(token_ids)} tokens and {len(entries)} log-probs"
        raise _Unfit(msg)
    found: list[float] = []
    for position, (token, entry) in enumerate(zip(token_ids[:count], entries, strict=False)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:  # noqa: PLR2004 - log-prob and id
            msg = f"token {position} is {token} and its log-prob entry is {entry}"
            raise _Unfit(msg)
        found.append(_number(entry[0], f"the log-prob of token {position}"))
    return tuple(found)


def _versions(meta: Mapping[str, Any], count: int, versions: Mapping[str, int]) -> Iterator[int]:
    """Yield the policy version of each token. Empty spans, which an abort may hold, are skipped."""
    position = 0
    for span in _get(meta, "weight_versions", list) if count else ():
        if not isinstance(span, dict):
            msg = f"the version span {span} is no object"
            raise _Unfit(msg)
        start, end = (_whole(span.get(key), f"{key} of a version span") for key in ("start", "end"))
        if start == end:
            continue
        if start != position or end < start:
            msg = f"version spans go on at {start}, where {position} tokens are covered"
            raise _Unfit(msg)
        name = str(span.get("version"))
        if name not in versions:
            msg = (
                f"tokens {start} to {end} carry weight version {name!r}, which this run never "
                "published; does another run use the server, or was it launched again?"
            )
            raise _Unfit(msg)
        yield from (versions[name] for _ in range(min(end, count) - start))
        position = end
    if position < count:
        msg = f"version spans cover {position} of {count} tokens"
        raise _Unfit(msg)


def _support(
    meta: Mapping[str, Any], total: int, count: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return the kept ids of the first ``count`` tokens, and the tokens' log-probs among them."""
    if total == 0:
        return (), ()
    masks, logprobs = _get(meta, _MASK, list), _get(meta, _MASK_LOGPROBS, list)
    if not len(masks) == len(logprobs) == total:
        msg = f"{total} tokens, {len(masks)} sampling masks and {len(logprobs)} of their log-probs"
        raise _Unfit(msg)
    support = tuple(_ids(mask) for mask in masks[:count])
    return support, tuple(_number(value, "a log-prob of a mask") for value in logprobs[:count])


def _get(content: Mapping[str, Any], key: str, kind: type) -> Any:  # noqa: ANN401 - parsed JSON
    value = content.get(key)
    if not isinstance(value, kind):
        msg = f"{key} is {value!r} instead of a {kind.__name__}"
        raise _Unfit(msg)
    return value


def _ids(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        msg = f"{values!r} is no list of token ids"
        raise _Unfit(msg)
    found = tuple(_whole(value, "a token id") for value in values)
    if found and min(found) < 0:
        msg = f"{min(found)} is no token id"
        raise _Unfit(msg)
    return found


def _whole(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        msg = f"{what} is {value!r}"
        raise _Unfit(msg)
    return value


def _number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        msg = f"{what} is {value!r}"
        raise _Unfit(msg)
    return float(value)
