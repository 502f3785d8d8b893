"""What the torch engine tells of its unfinished rollouts between two steps; changes nothing.

Owns: what is told is what the engine would go on from, whether the rollout runs, waits for room, or
has ended in a group that is not whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from headrace.generators.progress import NOTHING_KNOWN, Mark, Marks, RolloutPart, packed
from headrace.generators.stop_strings import Decode
from headrace.generators.torch_engine.rollout_state import (
    Begun,
    FinishedRollout,
    GroupCollector,
    RunningRollouts,
    Ticket,
)


def snapshot(
    running: RunningRollouts, waiting: Sequence[Ticket], marks: Marks, decode: Decode
) -> Mapping[str, tuple[RolloutPart, ...]]:
    """Return what is new behind ``marks``. ``waiting``: rollouts that have no row."""
    found: defaultdict[str, list[RolloutPart]] = defaultdict(list)
    collectors = _open_once([*running.tickets, *waiting])
    for ticket, part in _of_rows(running, marks):
        if collectors.get(ticket.request.group_id) is ticket.collector:
            found[ticket.request.group_id].append(part)
    for ticket in waiting:
        mark = _mark(ticket, marks)
        if mark is not None and collectors.get(ticket.request.group_id) is ticket.collector:
            told = _of_begun(ticket.rollout_index, ticket.begun, mark)
            found[ticket.request.group_id] += [] if told is None else [told]
    for group_id, collector in collectors.items():
        found[group_id] += _of_ended(collector.finished, marks.get(group_id, {}), decode)
    return {group_id: tuple(parts) for group_id, parts in found.items() if parts}


def _open_once(tickets: Iterable[Ticket]) -> dict[str, GroupCollector]:
    """Return where groups are collected, less those of an id that two calls have open."""
    by_id: defaultdict[str, set[GroupCollector]] = defaultdict(set)
    for ticket in tickets:
        by_id[ticket.request.group_id].add(ticket.collector)
    return {name: collectors.pop() for name, collectors in by_id.items() if len(collectors) == 1}


def _mark(ticket: Ticket, marks: Marks) -> Mark | None:
    return marks.get(ticket.request.group_id, {}).get(ticket.rollout_index)


def _of_rows(running: RunningRollouts, marks: Marks) -> Iterator[tuple[Ticket, RolloutPart]]:
    # Views of the columns, taken once: a slice of a tensor costs many times that of an array.
    ids, logprobs = running.token_ids.numpy(), running.logprobs.numpy()
    raw, versions = running.raw_logprobs.numpy(), running.policy_versions.numpy()
    lengths = running.num_generated.tolist()
    for row, ticket in enumerate(running.tickets):
        mark, length = _mark(ticket, marks), lengths[row]
        if mark is None:
            continue
        start = _start(mark, length, versions[row])
        if start == length == mark.num_tokens:
            continue
        params, cut = ticket.request.sampling, slice(start, length)
        mask = np.ones(length - start, dtype=np.bool_)
        given = ticket.begun.loss_mask[start:length]
        mask[: len(given)] = given
        yield (
            ticket,
            packed(
                ticket.rollout_index,
                start,
                completion_ids=ids[row, cut],
                generator_logprobs=logprobs[row, cut],
                loss_mask=mask,
                policy_versions=versions[row, cut].tolist(),
                raw_logprobs=raw[row, cut] if params.raw_logprobs else None,
                kept_support=running.kept_support[row][cut] if params.records_support else None,
            ),
        )


def _of_begun(
    rollout_index: int, begun: Begun, mark: Mark, ended: tuple[FinishedRollout, str] | None = None
) -> RolloutPart | None:
    """Return what ``begun`` holds behind ``mark``; None for nothing that is new."""
    length = len(begun.completion_ids)
    start = _start(mark, length, begun.policy_versions)
    if start == length == mark.num_tokens and ended is None:
        return None
    raw, support = begun.raw_logprobs, begun.kept_support
    return packed(
        rollout_index,
        start,
        completion_ids=begun.completion_ids[start:],
        generator_logprobs=begun.generator_logprobs[start:],
        loss_mask=begun.loss_mask[start:],
        policy_versions=begun.policy_versions[start:],
        raw_logprobs=None if raw is None else raw[start:],
        kept_support=None if support is None else support[start:],
        finish_reason="abort" if ended is None else ended[0].finish_reason,
        text="" if ended is None else ended[1],
    )


def _of_ended(
    finished: Iterable[FinishedRollout], marks: Mapping[int, Mark], decode: Decode
) -> Iterator[RolloutPart]:
    for rollout in finished:
        mark = marks.get(rollout.rollout_index)
        # One that came to an error is sampled again, perhaps by a machine that is well.
        if mark is None or rollout.finish_reason == "error":
            continue
        ended = (rollout, decode(rollout.sampled.completion_ids))
        part = _of_begun(rollout.rollout_index, rollout.sampled, mark, ended)
        assert part is not None, "an end is news"
        yield part


def _start(mark: Mark, length: int, versions: Sequence[int]) -> int:
    """Return where what is new begins; ``versions`` of ``length`` tokens at least.

    A rollout that began anew did so under other weights, so the last known token tells.
    """
    known = mark.num_tokens
    if mark == NOTHING_KNOWN or known > length:
        return 0
    return known if versions[known - 1] == mark.last_version else 0
