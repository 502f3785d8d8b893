"""The running rollouts as columns: one row each, tensors where the hot path works.

Python touches a rollout when it is admitted, when it needs another cache block and when it ends,
never in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.generators.stop_strings import Decode
from headrace.generators.torch_engine.masks import TokenMasks
from headrace.generators.torch_engine.sampling import Drawn, SamplingRows
from headrace.generators.version_spans import version_spans
from headrace.types import (
    FinishReason,
    GenerationRequest,
    Rollout,
    RolloutGroup,
    SamplingParams,
    derive_seed,
)

NO_TOKEN = -1
"""Fills unused columns of the stop-id table; no token has this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an unfinished rollout has sampled so far; all sequences have its length."""

    completion_ids: tuple[int, ...] = ()
    generator_logprobs: tuple[float, ...] = ()
    policy_versions: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    """True where the policy chose the token."""
    raw_logprobs: tuple[float, ...] | None = None
    kept_support: tuple[bytes, ...] | None = None

    @classmethod
    def of(cls, rollout: Rollout) -> Begun:
        """Return what ``rollout`` holds, for going on from there."""
        return cls(
            completion_ids=rollout.completion_ids,
            generator_logprobs=rollout.generator_logprobs,
            policy_versions=rollout.policy_versions,
            loss_mask=rollout.loss_mask,
            raw_logprobs=rollout.raw_logprobs,
            kept_support=rollout.kept_support,
        )

    @classmethod
    def forced(cls, token_ids: tuple[int, ...], version: int) -> Begun:
        """Return what a rollout begins with that must begin with ``token_ids``."""
        count = len(token_ids)
        return cls(
            completion_ids=token_ids,
            generator_logprobs=(0.0,) * count,
            policy_versions=(version,) * count,
            loss_mask=(False,) * count,
            raw_logprobs=(0.0,) * count,
            kept_support=(b"",) * count,
        )

    def given(self, policy_version: int) -> Begun:
        """Return the leading tokens that the policy did not choose, entered anew.

        They carry ``policy_version``: a rollout that starts over has no part in older weights.
        """
        chosen = self.loss_mask
        length = chosen.index(True) if True in chosen else len(chosen)
        return Begun(
            completion_ids=self.completion_ids[:length],
            generator_logprobs=self.generator_logprobs[:length],
            policy_versions=(policy_version,) * length,
            loss_mask=self.loss_mask[:length],
            raw_logprobs=self.raw_logprobs and self.raw_logprobs[:length],
            kept_support=self.kept_support and self.kept_support[:length],
        )


NOTHING = Begun()
"""Of a rollout that has no token yet."""


@dataclass(slots=True, kw_only=True)
class Ticket:
    """One rollout that was asked for, and where its finished group is collected."""

    request: GenerationRequest
    rollout_index: int
    collector: GroupCollector
    begun: Begun = NOTHING

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What must be in the cache before its next token: the prompt, and how it goes on."""
        begun = self.begun.completion_ids or self.request.sampling.forced_prefix
        return (*self.request.prompt.token_ids, *begun)

    def started(self, version: int) -> Ticket:
        """Return this ticket once `token_ids` are computed, by the weights of ``version``."""
        prefix = self.request.sampling.forced_prefix
        if self.begun.completion_ids or not prefix:
            return self
        return replace(self, begun=Begun.forced(prefix, version))

    def taken_back(self) -> FinishedRollout:
        """Return the rollout as it stands, to go on some other time."""
        return FinishedRollout(
            rollout_index=self.rollout_index, sampled=self.begun, finish_reason="abort"
        )


@dataclass(slots=True, kw_only=True)
class FinishedRollout:
    """Raw outcome of one rollout, before its text is decoded."""

    rollout_index: int
    sampled: Begun
    finish_reason: FinishReason

    def to_rollout(self, text: str) -> Rollout:
        """Return the record."""
        return Rollout(
            rollout_index=self.rollout_index,
            completion_ids=self.sampled.completion_ids,
            loss_mask=self.sampled.loss_mask,
            generator_logprobs=self.sampled.generator_logprobs,
            version_spans=version_spans(self.sampled.policy_versions),
            finish_reason=self.finish_reason,
            text=text,
            raw_logprobs=self.sampled.raw_logprobs,
            kept_support=self.sampled.kept_support,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class GroupCollector:
    """Collects the rollouts of one request until all have ended.

    Compared by identity: two calls may use one group id, and each gets its own rollouts.
    """

    request: GenerationRequest
    submitted_at: float = field(default_factory=time.monotonic)
    finished: list[FinishedRollout] = field(default_factory=list)
    ended_before: list[Rollout] = field(init=False)
    """Those of the request's begun ones that have nothing left to be sampled."""

    def __post_init__(self) -> None:
        settled = [as_it_ended(rollout, self.request.sampling) for rollout in self.request.begun]
        self.ended_before = [rollout for rollout in settled if not rollout.may_go_on]

    @property
    def is_whole(self) -> bool:
        """Whether every rollout has ended."""
        return len(self.finished) + len(self.ended_before) == self.request.group_size

    def tickets(self) -> list[Ticket]:
        """Return one ticket for each rollout that is to be sampled, from where it stands."""
        begun = {r.rollout_index: Begun.of(r) for r in self.request.begun}
        ended = {rollout.rollout_index for rollout in self.ended_before}
        return [
            Ticket(
                request=self.request,
                rollout_index=index,
                collector=self,
                begun=begun.get(index, NOTHING),
            )
            for index in range(self.request.group_size)
            if index not in ended
        ]

    def add(self, rollout: FinishedRollout) -> bool:
        """Return whether this was the last one."""
        self.finished.append(rollout)
        return self.is_whole

    def group(self, decode: Decode) -> RolloutGroup:
        """Return the record of a whole group, its rollouts in order."""
        assert self.is_whole, f"group {self.request.group_id} is not whole"
        sampled = [r.to_rollout(decode(r.sampled.completion_ids)) for r in self.finished]
        rollouts = sorted((*self.ended_before, *sampled), key=lambda r: r.rollout_index)
        return RolloutGroup(
            group_id=self.request.group_id,
            prompt=self.request.prompt,
            rollouts=tuple(rollouts),
            sampling=self.request.sampling,
        )


def as_it_ended(rollout: Rollout, sampling: SamplingParams) -> Rollout:
    """Return ``rollout`` with the reason of its end, if it was taken back with nothing left to do.

    A stop id or the token limit ends a rollout with its token, whoever sampled it. A stop string is
    not looked for in what came in: the engine that sampled its last token would have ended there.
    """
    length = len(rollout.completion_ids)
    if not rollout.may_go_on or not length:
        return rollout
    may_stop = rollout.loss_mask[-1] and length > sampling.min_tokens
    if may_stop and rollout.completion_ids[-1] in sampling.stop_token_ids:
        return replace(rollout, finish_reason="stop")
    return replace(rollout, finish_reason="length") if length >= sampling.max_tokens else rollout


class RunningRollouts:
    """Columns of the running rollouts, on the CPU, in the order in which they were admitted.

    Only ``sampling`` lies where logits do: it changes when a row does, and is read at each token.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: of the logits."""
        self._device = device
        self.tickets: list[Ticket] = []
        self.prompt_length = torch.zeros(0, dtype=torch.int64)
        self.num_generated = torch.zeros(0, dtype=torch.int64)
        self.max_tokens = torch.zeros(0, dtype=torch.int64)
        self.seed = torch.zeros(0, dtype=torch.int64)
        self.num_blocks = torch.zeros(0, dtype=torch.int64)
        self.stop_ids = torch.zeros(0, 0, dtype=torch.int64)
        self.token_ids = torch.zeros(0, 0, dtype=torch.int64)
        self.logprobs = torch.zeros(0, 0, dtype=torch.float32)
        self.raw_logprobs = torch.zeros(0, 0, dtype=torch.float32)
        """As wide as ``token_ids`` where a rollout wants them."""
        self.kept_support: list[list[bytes]] = []
        """[n] of each token so far, where the rollout wants it."""
        self.policy_versions = torch.zeros(0, 0, dtype=torch.int64)
        self.blocks = torch.zeros(0, 0, dtype=torch.int64)
        """[n, T] cache blocks, of which row i uses the first ``num_blocks[i]``."""
        self.is_mixed = torch.zeros(0, dtype=torch.bool)
        """[n] bool: some of a rollout's cache was computed by weights that were replaced since."""
        self.sampling = sampling_rows([]).to(device)
        self.min_tokens = torch.zeros(0, dtype=torch.int64)
        self.early_mask = torch.zeros(0, dtype=torch.int64)
        """[n] which of ``masks`` holds before ``min_tokens``; ``late_mask`` from there on."""
        self.late_mask = torch.zeros(0, dtype=torch.int64)
        self.masks = TokenMasks()
        self.any_stop_strings = False
        self.layout = 0
        """Changes whenever a row or one of its blocks does."""

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def last_token(self) -> Tensor:
        """[n] the token each rollout sampled last."""
        return self.token_ids.gather(1, (self.num_generated - 1).unsqueeze(1)).squeeze(1)

    @property
    def next_block(self) -> Tensor:
        """[n] the block that each rollout's last token goes to: its newest one."""
        return self.blocks.gather(1, (self.num_blocks - 1).unsqueeze(1)).squeeze(1)

    @property
    def cached_length(self) -> Tensor:
        """[n] tokens of each rollout whose keys and values are in the cache: all but the last."""
        return self.prompt_length + self.num_generated - 1

    def append(self, tickets: Sequence[Ticket], blocks: Sequence[Sequence[int]]) -> None:
        """Add rows for ``tickets``, with the cache blocks that hold their tokens so far."""
        self.layout += 1
        first = len(self.tickets)
        params = [ticket.request.sampling for ticket in tickets]
        seeds = [derive_seed(t.request.seed, t.rollout_index) for t in tickets]
        begun = [ticket.begun for ticket in tickets]
        prompts = [len(ticket.request.prompt.token_ids) for ticket in tickets]
        self.tickets.extend(tickets)
        self.prompt_length = _joined(self.prompt_length, prompts)
        self.num_generated = _joined(self.num_generated, [len(b.completion_ids) for b in begun])
        self.max_tokens = _joined(self.max_tokens, [param.max_tokens for param in params])
        self.seed = _joined(self.seed, seeds)
        self.num_blocks = _joined(self.num_blocks, [len(row) for row in blocks])
        self.is_mixed = torch.cat((self.is_mixed, torch.zeros(len(tickets), dtype=torch.bool)))
        width = max(param.max_tokens for param in params)
        self.token_ids = _widened(self.token_ids, len(tickets), width)
        self.logprobs = _widened(self.logprobs, len(tickets), width)
        self.policy_versions = _widened(self.policy_versions, len(tickets), width)
        self.blocks = _widened(self.blocks, len(tickets), max(len(row) for row in blocks))
        self._read_params(len(tickets))
        for row, (ticket, held) in enumerate(zip(tickets, blocks, strict=True), start=first):
            self._restore(row, ticket.begun)
            self.blocks[row, : len(held)] = torch.tensor(held)
        self.any_stop_strings |= any(param.stop_strings for param in params)

    def _read_params(self, num_new: int) -> None:
        """Make the columns that depend on nothing but the sampling parameters."""
        params = [ticket.request.sampling for ticket in self.tickets]
        self.stop_ids = _stop_table(self.tickets)
        self.sampling = sampling_rows(params).to(self._device)
        self.min_tokens = torch.tensor([param.min_tokens for param in params])
        self.early_mask, self.late_mask = self.masks.assign(params)
        width = self.token_ids.shape[1] if self.sampling.any_raw else 0
        self.raw_logprobs = _widened(self.raw_logprobs, num_new, width)

    def _restore(self, row: int, begun: Begun) -> None:
        self.kept_support.append(list(begun.kept_support or ()))
        length = len(begun.completion_ids)
        if length:
            self.token_ids[row, :length] = torch.tensor(begun.completion_ids)
            self.logprobs[row, :length] = torch.tensor(begun.generator_logprobs)
            self.policy_versions[row, :length] = torch.tensor(begun.policy_versions)
            if self.tickets[row].request.sampling.raw_logprobs:
                self.raw_logprobs[row, :length] = torch.tensor(begun.raw_logprobs)

    def forbidden(self, rows: slice, vocab_size: int, device: torch.device) -> Tensor | None:
        """Return [m, V] bool: what each of the m ``rows`` may not sample next; None: nothing."""
        early = self.num_generated[rows] < self.min_tokens[rows]
        index = torch.where(early, self.early_mask[rows], self.late_mask[rows])
        return self.masks.forbidden(index, vocab_size, device)

    def record(self, rows: slice, drawn: Drawn, version: int) -> None:
        """Append to each rollout in ``rows`` one token on the CPU, sampled under ``version``."""
        columns = self.num_generated[rows].unsqueeze(1)
        self.token_ids[rows].scatter_(1, columns, drawn.ids.unsqueeze(1))
        self.logprobs[rows].scatter_(1, columns, drawn.logprobs.unsqueeze(1))
        self.policy_versions[rows].scatter_(1, columns, version)
        if drawn.raw_logprobs is not None:
            self.raw_logprobs[rows].scatter_(1, columns, drawn.raw_logprobs.unsqueeze(1))
        for row, support in drawn.kept_support.items():
            self.kept_support[rows.start + row].append(support)
        self.num_generated[rows] += 1

    def add_blocks(self, rows: Tensor, blocks: Sequence[int]) -> None:
        """Give each of ``rows`` [m] one more block."""
        self.layout += 1
        columns = self.num_blocks[rows]
        self.blocks = _widened(self.blocks, 0, int(columns.max()) + 1)
        self.blocks[rows, columns] = torch.tensor(blocks)
        self.num_blocks[rows] += 1

    def held_blocks(self, row: int) -> list[int]:
        """Return the blocks of one rollout, in the order of its tokens."""
        held: list[int] = self.blocks[row, : int(self.num_blocks[row])].tolist()
        return held

    def stopped(self) -> Tensor:
        """[n] bool: the last token is one of the rollout's stop ids."""
        return (self.last_token.unsqueeze(1) == self.stop_ids).any(1)

    def failed(self) -> Tensor:
        """[n] bool: the last token is none, since the logits were not finite; see `draw`."""
        newest = self.logprobs.gather(1, (self.num_generated - 1).unsqueeze(1))
        return newest.squeeze(1).isnan()

    def take_back_last(self, rows: Tensor) -> None:
        """Forget the last token of the rollouts where ``rows`` [n] is True."""
        self.num_generated -= rows.long()

    def sampled(self, row: int) -> Begun:
        """Return what rollout ``row`` has sampled."""
        length = int(self.num_generated[row])
        begun = self.tickets[row].begun.loss_mask
        params = self.tickets[row].request.sampling
        raw = tuple(self.raw_logprobs[row, :length].tolist()) if params.raw_logprobs else None
        support = tuple(self.kept_support[row][:length]) if params.records_support else None
        return Begun(
            completion_ids=tuple(self.token_ids[row, :length].tolist()),
            generator_logprobs=tuple(self.logprobs[row, :length].tolist()),
            policy_versions=tuple(self.policy_versions[row, :length].tolist()),
            # Whatever a row began with, the policy chose what was sampled here.
            loss_mask=(*begun, *(True,) * (length - len(begun))),
            raw_logprobs=raw,
            kept_support=support,
        )

    def keep(self, rows: Tensor) -> None:
        """Keep only ``rows`` [m] int64, in that order."""
        self.layout += 1
        self.tickets = [self.tickets[row] for row in rows.tolist()]
        self.prompt_length = self.prompt_length[rows]
        self.num_generated = self.num_generated[rows]
        self.max_tokens = self.max_tokens[rows]
        self.seed = self.seed[rows]
        self.num_blocks = self.num_blocks[rows]
        self.stop_ids = self.stop_ids[rows]
        self.token_ids = self.token_ids[rows]
        self.logprobs = self.logprobs[rows]
        self.raw_logprobs = self.raw_logprobs[rows]
        self.kept_support = [self.kept_support[row] for row in rows.tolist()]
        self.policy_versions = self.policy_versions[rows]
        self.blocks = self.blocks[rows]
        self.is_mixed = self.is_mixed[rows]
        self.sampling = self.sampling.at(rows.to(self._device))
        self.min_tokens = self.min_tokens[rows]
        self.early_mask = self.early_mask[rows]
        self.late_mask = self.late_mask[rows]
        self.any_stop_strings &= bool(self.tickets)


def _joined(column: Tensor, values: Sequence[int]) -> Tensor:
    return torch.cat((column, torch.tensor(values, dtype=torch.int64)))


def _widened(table: Tensor, num_new: int, width: int) -> Tensor:
    """Return ``table`` [n, w] with ``num_new`` more rows and at least ``width`` columns."""
    num_rows, held = table.shape
    if num_new == 0 and width <= held:
        return table
    wider = table.new_zeros(num_rows + num_new, max(width, held))
    wider[:num_rows, :held] = table
    return wider


def _stop_table(tickets: Sequence[Ticket]) -> Tensor:
    """Return [n, S] stop ids, filled up with an id that no token has."""
    rows = [ticket.request.sampling.stop_token_ids for ticket in tickets]
    width = max((len(row) for row in rows), default=0)
    table = [(*row, *(NO_TOKEN,) * (width - len(row))) for row in rows]
    return torch.tensor(table, dtype=torch.int64).view(len(rows), width)


def sampling_rows(params: Sequence[SamplingParams]) -> SamplingRows:
    """Return the columns of ``params``."""
    temperature = torch.tensor([param.temperature for param in params], dtype=torch.float32)
    filters = torch.tensor([param.truncates for param in params], dtype=torch.bool)
    return SamplingRows(
        temperature=temperature,
        top_p=torch.tensor([param.top_p for param in params], dtype=torch.float64),
        top_k=torch.tensor([param.top_k for param in params], dtype=torch.int64),
        min_p=torch.tensor([param.min_p for param in params], dtype=torch.float32),
        filters=filters & (temperature > 0),
        wants_raw=torch.tensor([param.raw_logprobs for param in params], dtype=torch.bool),
        wants_support=torch.tensor([param.records_support for param in params], dtype=torch.bool),
        truncates=any(param.truncates for param in params),
        # Of what rows hold in fp32: a number that is nearly 0 or 1 may have become it.
        any_greedy=bool((temperature == 0).any()),
        any_scaled=bool(((temperature != 0) & (temperature != 1)).any()),
        any_raw=any(param.raw_logprobs for param in params),
        any_support=any(param.records_support for param in params),
    )
