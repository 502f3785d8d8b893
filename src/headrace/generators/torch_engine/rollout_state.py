"""The running rollouts as columns: one row a slot, tensors where the hot path works.

Python touches a rollout when it is admitted and when it ends, never in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.generators.torch_engine.sampling import SamplingRows
from headrace.types import (
    FinishReason,
    GenerationRequest,
    Rollout,
    SamplingParams,
    VersionSpan,
    derive_seed,
)

NO_TOKEN = -1
"""Fills unused columns of the stop-id table; no token has this id."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One rollout that was asked for, and where its finished group is collected."""

    request: GenerationRequest
    rollout_index: int
    collector: GroupCollector


@dataclass(slots=True, kw_only=True)
class FinishedRollout:
    """Raw outcome of one rollout, before its text is decoded."""

    rollout_index: int
    completion_ids: tuple[int, ...]
    generator_logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason

    def to_rollout(self, text: str) -> Rollout:
        """Return the record, every token chosen by the policy under one version."""
        length = len(self.completion_ids)
        span = VersionSpan(policy_version=self.policy_version, start=0, end=length)
        return Rollout(
            rollout_index=self.rollout_index,
            completion_ids=self.completion_ids,
            loss_mask=(True,) * length,
            generator_logprobs=self.generator_logprobs,
            version_spans=(span,),
            finish_reason=self.finish_reason,
            text=text,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class GroupCollector:
    """Collects the rollouts of one request until all have ended.

    Compared by identity: two calls may use one group id, and each gets its own rollouts.
    """

    request: GenerationRequest
    finished: list[FinishedRollout] = field(default_factory=list)

    def add(self, rollout: FinishedRollout) -> bool:
        """Return whether this was the last one."""
        self.finished.append(rollout)
        return len(self.finished) == self.request.group_size


class RunningRollouts:
    """Columns of the running rollouts, on the CPU; row i is cache slot i."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.prompt_length = torch.zeros(0, dtype=torch.int64)
        self.num_generated = torch.zeros(0, dtype=torch.int64)
        self.max_tokens = torch.zeros(0, dtype=torch.int64)
        self.seed = torch.zeros(0, dtype=torch.int64)
        self.stop_ids = torch.zeros(0, 0, dtype=torch.int64)
        self.token_ids = torch.zeros(0, 0, dtype=torch.int64)
        self.logprobs = torch.zeros(0, 0, dtype=torch.float32)
        self.sampling = sampling_rows([])
        self.any_stop_strings = False

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def last_token(self) -> Tensor:
        """[n] the token each rollout sampled last."""
        return self.token_ids.gather(1, (self.num_generated - 1).unsqueeze(1)).squeeze(1)

    @property
    def cached_length(self) -> Tensor:
        """[n] tokens of each rollout whose keys and values are in the cache: all but the last."""
        return self.prompt_length + self.num_generated - 1

    def append(self, tickets: Sequence[Ticket]) -> None:
        """Add rows for ``tickets``, none of which has a token yet."""
        params = [ticket.request.sampling for ticket in tickets]
        requests = [ticket.request for ticket in tickets]
        lengths = [len(request.prompt.token_ids) for request in requests]
        seeds = [derive_seed(t.request.seed, t.rollout_index) for t in tickets]
        self.tickets.extend(tickets)
        self.prompt_length = _joined(self.prompt_length, lengths)
        self.num_generated = _joined(self.num_generated, [0] * len(tickets))
        self.max_tokens = _joined(self.max_tokens, [param.max_tokens for param in params])
        self.seed = _joined(self.seed, seeds)
        self._widen(max(param.max_tokens for param in params), len(tickets))
        self.stop_ids = _stop_table(self.tickets)
        self.sampling = sampling_rows([ticket.request.sampling for ticket in self.tickets])
        self.any_stop_strings |= any(param.stop_strings for param in params)

    def _widen(self, width: int, num_new: int) -> None:
        width = max(width, self.token_ids.shape[1])
        shape = (len(self.tickets) - num_new, self.token_ids.shape[1])
        ids = torch.zeros(len(self.tickets), width, dtype=torch.int64)
        logprobs = torch.zeros(len(self.tickets), width, dtype=torch.float32)
        ids[: shape[0], : shape[1]] = self.token_ids
        logprobs[: shape[0], : shape[1]] = self.logprobs
        self.token_ids, self.logprobs = ids, logprobs

    def record(self, rows: slice, token_ids: Tensor, logprobs: Tensor) -> None:
        """Append one sampled token and its log-prob to each rollout in ``rows``."""
        columns = self.num_generated[rows].unsqueeze(1)
        self.token_ids[rows].scatter_(1, columns, token_ids.unsqueeze(1))
        self.logprobs[rows].scatter_(1, columns, logprobs.unsqueeze(1))
        self.num_generated[rows] += 1

    def stopped(self) -> Tensor:
        """[n] bool: the last token is one of the rollout's stop ids."""
        return (self.last_token.unsqueeze(1) == self.stop_ids).any(1)

    def finished(self, row: int, reason: FinishReason, policy_version: int) -> FinishedRollout:
        """Return what rollout ``row`` sampled."""
        length = int(self.num_generated[row])
        return FinishedRollout(
            rollout_index=self.tickets[row].rollout_index,
            completion_ids=tuple(self.token_ids[row, :length].tolist()),
            generator_logprobs=tuple(self.logprobs[row, :length].tolist()),
            policy_version=policy_version,
            finish_reason=reason,
        )

    def keep(self, rows: Tensor) -> None:
        """Keep only ``rows`` [m] int64, in that order."""
        self.tickets = [self.tickets[row] for row in rows.tolist()]
        self.prompt_length = self.prompt_length[rows]
        self.num_generated = self.num_generated[rows]
        self.max_tokens = self.max_tokens[rows]
        self.seed = self.seed[rows]
        self.stop_ids = self.stop_ids[rows]
        self.token_ids = self.token_ids[rows]
        self.logprobs = self.logprobs[rows]
        self.sampling = self.sampling.at(rows)
        self.any_stop_strings &= bool(self.tickets)


def _joined(column: Tensor, values: Sequence[int]) -> Tensor:
    return torch.cat((column, torch.tensor(values, dtype=torch.int64)))


def _stop_table(tickets: Sequence[Ticket]) -> Tensor:
    """Return [n, S] stop ids, filled up with an id that no token has."""
    rows = [ticket.request.sampling.stop_token_ids for ticket in tickets]
    width = max((len(row) for row in rows), default=0)
    table = [(*row, *(NO_TOKEN,) * (width - len(row))) for row in rows]
    return torch.tensor(table, dtype=torch.int64).view(len(rows), width)


def sampling_rows(params: Sequence[SamplingParams]) -> SamplingRows:
    """Return the columns of ``params``."""
    return SamplingRows(
        temperature=torch.tensor([param.temperature for param in params], dtype=torch.float32),
        top_p=torch.tensor([param.top_p for param in params], dtype=torch.float64),
        top_k=torch.tensor([param.top_k for param in params], dtype=torch.int64),
        min_p=torch.tensor([param.min_p for param in params], dtype=torch.float32),
        truncates=any(param.truncates for param in params),
        any_greedy=any(param.temperature == 0 for param in params),
        any_scaled=any(param.temperature not in {0.0, 1.0} for param in params),
    )
