"""Log-probs of a micro-batch by a model that only transformers computes.

Every rollout is a row of its own, prompt included, padded on the right: nothing is shared. Rows are
computed in passes of about as many tokens as the micro-batch has packed. Where there are several,
each is computed again in the backward pass, so that the budget of tokens bounds memory here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.learners.packing import Microbatch
from headrace.models.foreign import ForeignDecoder
from headrace.objectives.logprobs import Support, linear_logprobs

R = TypeVar("R")

LOGIT_CHUNK = 512
"""Tokens whose logits are held together where they are more than a product."""


def foreign_logprobs(
    decoder: ForeignDecoder,
    hidden: Tensor,
    batch: Microbatch,
    temperature: float,
    dtype: torch.dtype,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [M] of the trained tokens from their `trained_hidden`."""
    if decoder.has_plain_head:
        return linear_logprobs(
            hidden.to(dtype),
            decoder.output_weight,
            batch.target_ids,
            temperature=temperature,
            chunk_tokens=LOGIT_CHUNK,
            support=batch.support,
            entropy_gradient=entropy_gradient,
        )
    logprobs, entropy = _head_logprobs(decoder, hidden, batch, temperature)
    return logprobs, entropy if entropy_gradient else entropy.detach()


def trained_hidden(decoder: ForeignDecoder, batch: Microbatch) -> Tensor:
    """Return [M, hidden]: what the output layer reads to predict each trained token."""
    passes = list(_passes(batch))
    found = [
        _again(decoder.hidden, part.input_ids, part.rows, part.columns, when=len(passes) > 1)
        for part in passes
    ]
    order = torch.cat([part.tokens for part in passes])
    return torch.cat(found)[order.argsort()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Rollouts that are computed together."""

    input_ids: Tensor
    """[B, L]"""
    tokens: Tensor
    """[m] which of the micro-batch's trained tokens these are."""
    rows: Tensor
    """[m] of ``input_ids``, and ``columns``: what predicts them."""
    columns: Tensor


def _passes(batch: Microbatch) -> Iterator[_Pass]:
    sequences = _sequences(batch)
    order = sorted(range(len(sequences)), key=lambda row: len(sequences[row]), reverse=True)
    columns = batch.positions[batch.source_rows]
    while order:
        # Longest first: a pass is as wide as its first row.
        count = max(1, len(batch.input_ids) // max(1, len(sequences[order[0]])))
        own, order = order[:count], order[count:]
        rank = torch.full((len(sequences),), -1, device=columns.device)
        rank[torch.tensor(own, device=columns.device)] = torch.arange(
            len(own), device=columns.device
        )
        rows = rank[batch.rollout_index]
        tokens = (rows >= 0).nonzero().flatten()
        yield _Pass(
            input_ids=torch.nn.utils.rnn.pad_sequence([sequences[r] for r in own], True),  # noqa: FBT003 - batch first
            tokens=tokens,
            rows=rows[tokens],
            columns=columns[tokens],
        )


def _sequences(batch: Microbatch) -> list[Tensor]:
    """Return the input tokens of each completion, with its prompt before them."""
    lengths = [batch.num_shared, *batch.suffix_lengths, *batch.completion_lengths]
    shared, *parts = torch.split(batch.input_ids, lengths)
    suffixes, completions = parts[: len(batch.prompt_lengths)], parts[len(batch.prompt_lengths) :]
    return [
        torch.cat((shared, suffixes[owner], completion))
        for owner, completion in zip(batch.prompt_of_completion, completions, strict=True)
    ]


def _head_logprobs(
    decoder: ForeignDecoder, hidden: Tensor, batch: Microbatch, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [M] through the model's own logits, a chunk at a time."""

    def chunk(states: Tensor, ids: Tensor, forbidden: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = decoder.logits(states)
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        if forbidden is not None:
            scaled = scaled.masked_fill(forbidden, -torch.inf)
        logprobs = scaled.log_softmax(dim=-1)
        # A token of probability 0 adds 0, and has no gradient of 0 * -inf.
        finite = logprobs if forbidden is None else logprobs.masked_fill(forbidden, 0.0)
        chosen = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return chosen, -(logprobs.exp() * finite).sum(dim=-1)

    starts = range(0, len(hidden), LOGIT_CHUNK)
    found = [
        _again(
            chunk,
            hidden[start : start + LOGIT_CHUNK],
            batch.target_ids[start : start + LOGIT_CHUNK],
            _forbidden(batch.support, start, len(hidden), decoder.config.vocab_size),
            when=True,
        )
        for start in starts
    ]
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _forbidden(support: Support | None, start: int, end: int, vocab_size: int) -> Tensor | None:
    """Return [rows, vocab] bool of the chunk from ``start``: what was left out; None: nothing."""
    if support is None:
        return None
    stop = min(start + LOGIT_CHUNK, end)
    inside = ((support.rows >= start) & (support.rows < stop)).nonzero().flatten()
    forbidden = torch.ones(stop - start, vocab_size, dtype=torch.bool, device=support.ids.device)
    forbidden[support.rows[inside] - start, support.ids[inside]] = False
    return forbidden


def _again(work: Callable[..., R], *arguments: Tensor | None, when: bool) -> R:
    """Return ``work(*arguments)``, computed again in the backward pass and not kept if ``when``."""
    if not when or not torch.is_grad_enabled():
        return work(*arguments)
    found: R = checkpoint(work, *arguments, use_reentrant=False, preserve_rng_state=False)
    return found
