"""A rollout on its way: what is sampled so far, from one call or from several.

Owns what a reply means for the rollout: which of the reported log-probs is the one of the
distribution sampled from, and whether the rollout has ended. No token is ever sampled twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace import kept_support
from headrace.config.sglang_rules import asks_support, is_point
from headrace.generators.sglang.reply import Sampled
from headrace.generators.stop_strings import Decode, completes_stop_string
from headrace.generators.version_spans import version_spans
from headrace.types import (
    FinishReason,
    GenerationRequest,
    Rollout,
    derive_seed,
)


class Draft:
    """One rollout of ``request`` that has not been given back yet."""

    def __init__(self, request: GenerationRequest, rollout_index: int, decode: Decode) -> None:
        self.request = request
        self.rollout_index = rollout_index
        self.seed = derive_seed(request.seed, rollout_index)
        self._decode = decode
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        self._support: list[bytes] = []
        self._versions: list[int] = []
        self._came_in = False
        """Whether its first tokens are begun ones, which keep the versions they came with."""
        for rollout in request.begun:
            if rollout.rollout_index == rollout_index:
                self._take_up(rollout)

    def start_over(self) -> None:
        """Forget what the policy has sampled, here or elsewhere; leading given tokens stay."""
        self._keep(self._mask.index(True) if any(self._mask) else len(self._mask))
        self._came_in = False

    def begin(self, policy_version: int) -> None:
        """Enter the tokens that come before the first one sampled, under ``policy_version``."""
        if self._came_in or any(self._mask):
            return
        prefix = self.request.sampling.forced_prefix
        if prefix and not self.token_ids:
            zeros = [0.0] * len(prefix)
            self._append(prefix, zeros, zeros, [policy_version] * len(prefix), chosen=False)
            self._support += [b""] * len(prefix)
        # A rollout that starts over, or has sampled nothing yet, has no part in older weights.
        self._versions = [policy_version] * len(self.token_ids)

    def add(self, sampled: Sampled) -> None:
        """Append what a call has sampled; sets ``finish_reason`` if the rollout has ended."""
        before = len(self.token_ids)
        self._append(
            sampled.token_ids,
            self._behaviour(sampled),
            sampled.logprobs,
            sampled.policy_versions,
            chosen=True,
        )
        self._support += self._kept(sampled)
        reason = sampled.finish_reason
        self.finish_reason = None if reason == "abort" else reason
        self._cut_at_stop_string(before)
        if self.finish_reason is None:
            self.finish_reason = self._own_end()

    def rollout(self) -> Rollout:
        """Return the record; unfinished, it can go on."""
        sampling = self.request.sampling
        return Rollout(
            rollout_index=self.rollout_index,
            completion_ids=tuple(self.token_ids),
            loss_mask=tuple(self._mask),
            generator_logprobs=tuple(self._logprobs),
            version_spans=version_spans(self._versions),
            finish_reason=self.finish_reason or "abort",
            text=self._decode(self.token_ids),
            raw_logprobs=tuple(self._raw) if sampling.raw_logprobs else None,
            kept_support=tuple(self._support) if sampling.records_support else None,
        )

    def _take_up(self, rollout: Rollout) -> None:
        self.token_ids = list(rollout.completion_ids)
        self._came_in = bool(self.token_ids)
        self._mask = list(rollout.loss_mask)
        self._logprobs = list(rollout.generator_logprobs)
        self._raw = list(rollout.raw_logprobs or [0.0] * len(rollout.completion_ids))
        self._versions = list(rollout.policy_versions)
        self._support = list(rollout.kept_support or [b""] * len(rollout.completion_ids))
        self.finish_reason = self._own_end() if rollout.may_go_on else rollout.finish_reason

    def _append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
        versions: Sequence[int],
        *,
        chosen: bool,
    ) -> None:
        self.token_ids += token_ids
        self._mask += [chosen] * len(token_ids)
        self._logprobs += logprobs
        self._raw += raw
        self._versions += versions

    def _behaviour(self, sampled: Sampled) -> Sequence[float]:
        """Return the log-probs under the distribution sampled from."""
        if is_point(self.request.sampling):
            return [0.0] * len(sampled.token_ids)
        if asks_support(self.request.sampling):
            assert sampled.support_logprobs is not None
            return sampled.support_logprobs
        return sampled.logprobs

    def _kept(self, sampled: Sampled) -> list[bytes]:
        """Return what each token was drawn from, packed: a greedy one from itself alone."""
        if not self.request.sampling.records_support:
            return [b""] * len(sampled.token_ids)
        support = sampled.support or [(token,) for token in sampled.token_ids]
        return [kept_support.encode(sorted(set(ids))) for ids in support]

    def _own_end(self) -> FinishReason | None:
        """Say whether the last token is an end. An abort hides it: SGLang looks no further then."""
        sampling, length = self.request.sampling, len(self.token_ids)
        may_stop = length > sampling.min_tokens and self._mask[-1]
        if may_stop and self.token_ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if length >= sampling.max_tokens else None

    def _cut_at_stop_string(self, before: int) -> None:
        """End with the first token after ``before`` that completes a stop string.

        A server looks less far: it takes the tokens before for a prompt, does not look any more
        once a request is aborted, and sees text in special tokens.
        """
        stops = self.request.sampling.stop_strings
        text = self._decode(self.token_ids) if stops else ""
        if not any(stop in text for stop in stops):
            return
        for length in range(before + 1, len(self.token_ids) + 1):
            if completes_stop_string(self.token_ids[:length], stops, self._decode):
                self._keep(length)
                self.finish_reason = "stop"
                return

    def _keep(self, length: int) -> None:
        for column in (
            self.token_ids, self._mask, self._logprobs, self._raw, self._support, self._versions
        ):  # fmt: skip
            del column[length:]
