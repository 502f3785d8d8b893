"""One rollout on its way: its tokens so far, whichever engine process sampled them.

Owns the exactness of a rollout across interruptions: a token that was delivered stays, with its
log-prob and the version that sampled it, and is never sampled again, unless the rollout starts over
at its prompt. Does not talk to an engine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from headrace.generators.stop_strings import Decode, completes_stop_string
from headrace.generators.version_spans import version_spans
from headrace.generators.vllm.engine import Delta
from headrace.types import (
    FinishReason,
    GenerationRequest,
    Rollout,
    derive_seed,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One rollout of one request."""

    request: GenerationRequest
    rollout_index: int
    decode: Decode
    completion_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None until it has ended."""
    life: int = 0
    """Changes whenever it is taken back: what arrives for an earlier life is not its own."""
    num_submitted: int = 0
    """Tokens of the completion that the last submission began with."""
    submitted_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None

    @classmethod
    def of(cls, request: GenerationRequest, rollout_index: int, decode: Decode) -> Flight:
        """Return the rollout as ``request`` has it: begun, ended or new."""
        flight = cls(request=request, rollout_index=rollout_index, decode=decode)
        for begun in request.begun:
            if begun.rollout_index == rollout_index:
                flight._take(begun)
        return flight

    def _take(self, begun: Rollout) -> None:
        self.completion_ids = list(begun.completion_ids)
        self.loss_mask = list(begun.loss_mask)
        self.logprobs = list(begun.generator_logprobs)
        self.policy_versions = list(begun.policy_versions)
        if not begun.may_go_on:
            self.finish_reason = begun.finish_reason
        elif len(self.completion_ids) >= self.request.sampling.max_tokens:
            self.finish_reason = "length"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion so far."""
        return (*self.request.prompt.token_ids, *self.completion_ids)

    @property
    def seed(self) -> int:
        """Of the rest: a function of the place in the seed tree and of how far it is."""
        seed = derive_seed(self.request.seed, self.rollout_index)
        return derive_seed(seed, len(self.completion_ids)) if self.completion_ids else seed

    def begin(self, policy_version: int) -> None:
        """Put the forced prefix in place if nothing is there yet; the next token is a new one."""
        prefix = self.request.sampling.forced_prefix
        if not self.completion_ids and prefix:
            self.completion_ids = list(prefix)
            self.loss_mask = [False] * len(prefix)
            self.logprobs = [0.0] * len(prefix)
            self.policy_versions = [policy_version] * len(prefix)
        self.num_submitted = len(self.completion_ids)

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to sample."""
        return self.finish_reason is not None

    @property
    def is_queued(self) -> bool:
        """Whether the engine that it was submitted to last has sampled nothing for it."""
        return len(self.completion_ids) == self.num_submitted

    def start_over(self, policy_version: int) -> None:
        """Forget every token that was sampled; leading ones that were given stay, entered anew.

        They carry ``policy_version``: a rollout that starts over has no part in older weights.
        """
        self.life += 1
        chosen = self.loss_mask
        length = chosen.index(True) if True in chosen else len(chosen)
        for column in (self.completion_ids, self.loss_mask, self.logprobs):
            del column[length:]
        self.policy_versions = [policy_version] * length

    def submit_again(self) -> None:
        """Keep every token; what arrives of the submission until now is not its own."""
        self.life += 1

    def extend(self, delta: Delta) -> None:
        """Append what the engine sampled, up to the token that completes a stop string."""
        sampling = self.request.sampling
        if delta.token_ids and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        for token, logprob, version in zip(
            delta.token_ids, delta.logprobs, delta.policy_versions, strict=True
        ):
            if not math.isfinite(logprob):
                # vLLM samples from logits that are no numbers without a word.
                self.finish_reason = "error"
                return
            self.completion_ids.append(token)
            self.loss_mask.append(True)
            # vLLM's greedy log-prob is of the softmax; the distribution drawn from is a point.
            self.logprobs.append(logprob if sampling.temperature > 0.0 else 0.0)
            self.policy_versions.append(version)
            if self._completes_a_stop_string():
                self.finish_reason = "stop"
                return
        if delta.finish_reason in {"stop", "length"}:
            self.finish_reason = "stop" if delta.finish_reason == "stop" else "length"

    def _completes_a_stop_string(self) -> bool:
        """Whether the newest token brought a stop string into the text that was not there."""
        sampling = self.request.sampling
        return len(self.completion_ids) > sampling.min_tokens and completes_stop_string(
            self.completion_ids, sampling.stop_strings, self.decode
        )

    def to_rollout(self) -> Rollout:
        """Return the record; one that has not ended was taken back."""
        return Rollout(
            rollout_index=self.rollout_index,
            completion_ids=tuple(self.completion_ids),
            loss_mask=tuple(self.loss_mask),
            generator_logprobs=tuple(self.logprobs),
            version_spans=version_spans(self.policy_versions),
            finish_reason=self.finish_reason or "abort",
            text=self.decode(self.completion_ids),
        )
