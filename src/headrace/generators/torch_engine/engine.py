"""The engine: `step` prefills, makes room, decodes, samples and retires. Single-threaded.

Continuous batching: a rollout enters between two decode steps as soon as there is room and leaves
the moment it ends, so a long one never holds the others. When the cache is full the youngest one
gives its blocks back and goes on later, from the same tokens. The engine stamps each token with the
policy version it was sampled under; weights change only between steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import assert_never

import torch

from headrace.errors import GeneratorFailure
from headrace.generators.failure_watch import FailureWatch
from headrace.generators.progress import Marks, Progress
from headrace.generators.stop_strings import Decode, completes_stop_string
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.rollout_state import (
    Begun,
    FinishedRollout,
    GroupCollector,
    RunningRollouts,
    Ticket,
)
from headrace.generators.torch_engine.runner_role import Runner
from headrace.generators.torch_engine.sampling import draw, uniforms
from headrace.generators.torch_engine.scheduler import Branch, Scheduler
from headrace.generators.torch_engine.snapshot import snapshot
from headrace.generators.torch_engine.statistics import Statistics
from headrace.generators.torch_engine.weight_set import prove
from headrace.models.weights import content
from headrace.types import FinishReason, GenerationRequest, OnUpdate, WeightUpdate


class Engine:
    """Samples rollouts from one copy of the weights."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, blocks: BlockManager, decode: Decode
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._blocks = blocks
        self._decode = decode
        self._running = RunningRollouts(runner.device)
        self._failures = FailureWatch()
        self._policy_version: int | None = None
        self._refusal = "asked to generate before the first update_weights"
        self.statistics = Statistics()
        """Since somebody last put new ones in their place."""

    @property
    def has_work(self) -> bool:
        """Whether any rollout runs or waits."""
        return len(self._running) > 0 or not self._scheduler.is_empty

    @property
    def num_unfinished(self) -> int:
        """Rollouts that run or wait."""
        return len(self._running) + self._scheduler.num_rollouts

    @property
    def num_running(self) -> int:
        """Rollouts that sample a token in every step."""
        return len(self._running)

    @property
    def num_held_blocks(self) -> int:
        """Cache blocks that running rollouts and unfinished prefills need."""
        return self._blocks.num_held

    def load(self, update: WeightUpdate, on_update: OnUpdate = "wait") -> None:
        """Replace every weight and prove that all of them arrived.

        Unfinished rollouts follow ``on_update``: with ``wait`` there must be none. Raises
        WeightSyncError. Where names, shapes or dtypes do not fit the old weights stay, and with
        unfinished rollouts also where the checksum does not. Where that of what is then held is
        not the published one, the engine samples no more until a load succeeds.
        """
        self._runner.check(update.tensors)
        if self.has_work:
            # A reading more, which an engine that has nothing to lose need not pay for.
            arrived = {name: content(tensor) for name, tensor in update.tensors.items()}
            prove(arrived, update.tensors, update.tensors, update.checksum)
        self._turn_to(update.policy_version, on_update)
        self._runner.load(update.tensors)
        self._runner.verify(update.tensors, update.checksum)
        self._policy_version = update.policy_version

    def stage(self, update: WeightUpdate) -> None:
        """Prepare every weight beside those at work and prove that all of them arrived.

        On any thread, while steps are made on theirs. Raises WeightSyncError, and whatever the
        tensors raise; the old weights stay in any case.
        """
        self._runner.check(update.tensors)
        self._runner.stage(update.tensors, update.checksum)

    def swap(self, policy_version: int, on_update: OnUpdate = "wait") -> None:
        """Put what was staged in the place of the weights at work; else as `load`."""
        self._turn_to(policy_version, on_update)
        self._runner.swap()
        self._policy_version = policy_version

    def _turn_to(self, policy_version: int, on_update: OnUpdate) -> None:
        """Do with unfinished rollouts and the cache what is to be done before weights change."""
        match on_update:
            case "wait":
                assert not self.has_work, "rollouts in flight would mix two versions"
            case "keep":
                # What is half prefilled has sampled nothing by it yet, so it need not mix versions.
                self._scheduler.start_over(())
                self._running.is_mixed = torch.ones(len(self._running), dtype=torch.bool)
            case "recompute":
                self._scheduler.start_over(self._take_out())
            case "restart":
                self._scheduler.start_over(
                    self._take_out(), lambda begun: begun.given(policy_version)
                )
            case _:
                assert_never(on_update)
        self._blocks.forget_names()
        self._policy_version = None
        self._refusal = f"the weights of version {policy_version} did not arrive whole"

    def _take_out(self) -> list[Ticket]:
        """Take every rollout that runs out; return what it goes on from."""
        running = self._running
        tickets = [
            replace(ticket, begun=running.sampled(row))
            for row, ticket in enumerate(running.tickets)
        ]
        self._leave(torch.ones(len(running), dtype=torch.bool))
        return tickets

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GroupCollector]:
        """Queue what ``requests`` leave to be sampled; return where each group is collected.

        Each must leave something: no step would ever return a group that is whole already.
        Raises GeneratorFailure while there are no whole weights to sample from.
        """
        if self._policy_version is None:
            raise GeneratorFailure(self._refusal)
        collectors = self._scheduler.submit(requests)
        assert not any(collector.is_whole for collector in collectors), "nothing is left to sample"
        going_on = [t for c in collectors for t in c.tickets() if any(t.begun.loss_mask)]
        self.statistics.num_continued += len(going_on)
        return collectors

    @torch.inference_mode()
    def step(self) -> list[GroupCollector]:
        """Give every running rollout one more token; return the groups that became whole.

        Raises GeneratorFailure while there are no whole weights to sample from.
        """
        if self._policy_version is None:
            raise GeneratorFailure(self._refusal)
        began = time.monotonic()
        finished = self._prefill()
        self._make_room()
        self._count()
        if len(self._running):
            self._sample(slice(0, len(self._running)), self._runner.decode(self._running))
            finished += self._retire()
        self.statistics.working_seconds += time.monotonic() - began
        return finished

    def _count(self) -> None:
        statistics = self.statistics
        statistics.num_steps += bool(self._running)
        statistics.num_running += len(self._running)
        statistics.max_running = self._scheduler.max_running
        statistics.most_held = max(statistics.most_held, self._blocks.num_held)
        statistics.num_blocks = self._blocks.num_blocks

    def drop(self, collectors: AbstractSet[GroupCollector]) -> None:
        """Take back every rollout of ``collectors``, running or waiting."""
        self._scheduler.drop(collectors)
        gone = [ticket.collector in collectors for ticket in self._running.tickets]
        self._leave(torch.tensor(gone, dtype=torch.bool))

    def abort(self, collectors: AbstractSet[GroupCollector]) -> None:
        """End every unfinished rollout of ``collectors`` as it is: each of them is whole then."""
        gone = [ticket.collector in collectors for ticket in self._running.tickets]
        for row, is_gone in enumerate(gone):
            if is_gone:
                ticket, sampled = self._running.tickets[row], self._running.sampled(row)
                self._keep_findable(row, ticket, sampled)
                self._hand_back(replace(ticket, begun=sampled))
        self._leave(torch.tensor(gone, dtype=torch.bool))
        for ticket in self._scheduler.drop(collectors):
            self._hand_back(ticket)

    def refuse(self, request: GenerationRequest) -> GroupCollector:
        """Return the whole group of a ``request`` that was never submitted, as it came."""
        collector = GroupCollector(request=request)
        for ticket in collector.tickets():
            self._hand_back(ticket)
        return collector

    def _hand_back(self, ticket: Ticket) -> None:
        self.statistics.num_aborted += 1
        ticket.collector.add(ticket.taken_back())

    def progress(self, marks: Marks) -> Progress:
        """Return what is new of unfinished groups behind ``marks``, and the time that took."""
        began = time.monotonic()
        parts = snapshot(self._running, self._scheduler.tickets, marks, self._decode)
        return Progress(parts=parts, seconds=time.monotonic() - began)

    def clear(self) -> None:
        """Forget everything that runs or waits, and the cache, which may hold what went wrong.

        A step that failed half way may have left blocks with nobody who would give them back.
        """
        self._scheduler.clear()
        self._running.keep(torch.zeros(0, dtype=torch.int64))
        self._blocks.reset()
        self._runner.clear_cache()

    def _prefill(self) -> list[GroupCollector]:
        """Compute the next parts of prompts; sample first tokens where a prompt is complete."""
        parts = self._scheduler.next_parts(len(self._running))
        if not parts:
            self._check_progress()
            return []
        self._reserve()
        self._wipe(self._scheduler.take_unproven())
        self.statistics.num_prefilled += sum(part.num_tokens for part in parts)
        logits = self._runner.prefill(parts)
        first = len(self._running)
        counts = [self._start(branch) for branch in self._scheduler.finished(parts)]
        if len(self._running) == first:
            return []
        repeats = torch.tensor(counts, device=logits.device)
        logits = logits.repeat_interleave(repeats, dim=0, output_size=sum(counts))
        self._sample(slice(first, len(self._running)), logits)
        self._note_first_tokens(self._running.tickets[first:])
        return self._retire()

    def _check_progress(self) -> None:
        """Nobody would notice an engine that makes steps and no token in them."""
        if self._scheduler.num_rollouts and not self._running:
            msg = (
                f"group {self._scheduler.first_waiting} cannot start although nothing else runs: "
                f"{self._blocks.num_held} of {self._blocks.num_blocks} blocks of the cache are "
                "held; raise generator.max_cache_gib if its prompt needs more than all of them"
            )
            raise GeneratorFailure(msg)

    def _note_first_tokens(self, tickets: Sequence[Ticket]) -> None:
        now = time.monotonic()
        self.statistics.first_token_seconds += [
            now - ticket.collector.submitted_at
            for ticket in tickets
            if not any(ticket.begun.loss_mask)
        ]

    def _start(self, branch: Branch) -> int:
        """Let the rollouts of a prefilled branch run; return how many there was room for.

        Whole blocks are shared. A last one that is not full will be written to, so every rollout
        but the first gets a copy of it; those for which there is no block wait once more.
        """
        self.statistics.num_found += branch.num_found
        num_whole = len(branch.token_ids) // self._blocks.block_size
        whole, rest = branch.blocks[:num_whole], branch.blocks[num_whole:]
        room = self._blocks.num_available if rest else len(branch.tickets)
        count = min(len(branch.tickets), 1 + room)
        copies = [self._blocks.take(len(rest)) for _ in range(count - 1)]
        if rest and copies:
            self._reserve()
            self._runner.copy_blocks(rest * len(copies), [block for own in copies for block in own])
        for _ in copies:
            self._blocks.hold(whole)
        assert self._policy_version is not None
        tickets = [ticket.started(self._policy_version) for ticket in branch.tickets[:count]]
        self._running.append(tickets, [whole + own for own in (rest, *copies)])
        self._scheduler.take_back(branch.tickets[count:])
        return count

    def _make_room(self) -> None:
        """See to it that every running rollout has a block for its next token."""
        needy = self._needy()
        while len(needy) > self._blocks.num_available:
            if not self._scheduler.preempt_prefill():
                self._preempt_youngest()
            needy = self._needy()
        self._wipe(self._scheduler.take_unproven())
        if len(needy):
            self._running.add_blocks(needy, self._blocks.take(len(needy)))
            self._reserve()

    def _reserve(self) -> None:
        self._runner.reserve(self._blocks.num_touched, self._blocks.num_blocks)

    def _needy(self) -> torch.Tensor:
        """Rows whose blocks are all full."""
        held = self._running.num_blocks * self._blocks.block_size
        return (self._running.cached_length >= held).nonzero().flatten()

    def _preempt_youngest(self) -> None:
        self.statistics.num_preemptions += 1
        row = len(self._running) - 1
        ticket = replace(self._running.tickets[row], begun=self._running.sampled(row))
        gone = torch.arange(len(self._running)) == row
        self._leave(gone)
        self._scheduler.take_back([ticket])

    def _sample(self, rows: slice, logits: torch.Tensor) -> None:
        assert self._policy_version is not None
        running = self._running
        uniform = uniforms(running.seed[rows], running.num_generated[rows], logits.device)
        forbidden = running.forbidden(rows, logits.shape[1], logits.device)
        drawn = draw(logits, running.sampling.at(rows), uniform, forbidden)
        running.record(rows, drawn.on_cpu(), self._policy_version)
        self.statistics.num_sampled += len(drawn.ids)

    def _retire(self) -> list[GroupCollector]:
        """Take ended rollouts out; return the groups that became whole.

        Raises GeneratorFailure when too many of them ended because their logits were not finite.
        """
        running = self._running
        failed = running.failed()
        stopped = ~failed & (running.stopped() | self._hit_stop_string())
        ended = failed | stopped | (running.num_generated >= running.max_tokens)
        if not bool(ended.any()):
            return []
        running.take_back_last(failed)
        broken = [b for row in _rows(failed) for b in running.held_blocks(row)]
        whole = [
            running.tickets[row].collector
            for row in _rows(ended)
            if self._collect(row, _reason(failed=bool(failed[row]), stopped=bool(stopped[row])))
        ]
        num_running = len(running)
        self._leave(ended)
        self._note_ended(int(failed.sum()), int(ended.sum()), num_running)
        self._wipe(self._blocks.discard(broken))
        return whole

    def _wipe(self, blocks: Sequence[int]) -> None:
        """Forget what ``blocks`` hold: 0 times what is not finite is NaN for whoever is next."""
        if blocks:
            self._runner.wipe_blocks(blocks)

    def _note_ended(self, num_failed: int, num_ended: int, num_running: int) -> None:
        assert self._policy_version is not None
        self.statistics.num_failed += num_failed
        self._failures.note(
            num_failed=num_failed,
            num_ended=num_ended,
            num_running=num_running,
            version=self._policy_version,
        )

    def _collect(self, row: int, reason: FinishReason) -> bool:
        ticket, sampled = self._running.tickets[row], self._running.sampled(row)
        if reason != "error":
            self._keep_findable(row, ticket, sampled)
            self.statistics.rollout_tokens.append(len(sampled.completion_ids))
            self.statistics.rollout_seconds.append(time.monotonic() - ticket.collector.submitted_at)
        rollout = FinishedRollout(
            rollout_index=ticket.rollout_index, sampled=sampled, finish_reason=reason
        )
        return ticket.collector.add(rollout)

    def _keep_findable(self, row: int, ticket: Ticket, sampled: Begun) -> None:
        """Name the blocks of a rollout, for a next turn that begins with its tokens.

        Not if weights that were replaced have computed some of them: only this rollout kept those.
        """
        if bool(self._running.is_mixed[row]):
            return
        # The last token was sampled and never fed in, so the cache does not hold it.
        cached = (*ticket.request.prompt.token_ids, *sampled.completion_ids[:-1])
        self._blocks.name(cached, self._running.held_blocks(row))

    def _leave(self, gone: torch.Tensor) -> None:
        """Take the rows where ``gone`` [n] is True out and give their blocks back."""
        if not bool(gone.any()):
            return
        for row in _rows(gone):
            self._blocks.release(self._running.held_blocks(row))
        self._running.keep((~gone).nonzero().flatten())

    def _hit_stop_string(self) -> torch.Tensor:
        """[n] bool: the newest token completed one of the rollout's stop strings and may end it."""
        hit = torch.zeros(len(self._running), dtype=torch.bool)
        if not self._running.any_stop_strings:
            return hit
        lengths = self._running.num_generated
        late = (lengths > self._running.min_tokens).tolist()
        for row, ticket in enumerate(self._running.tickets):
            strings = ticket.request.sampling.stop_strings
            if strings and late[row]:
                completion = self._running.token_ids[row, : int(lengths[row])].tolist()
                hit[row] = completes_stop_string(completion, strings, self._decode)
        return hit


def _rows(mask: torch.Tensor) -> list[int]:
    """Return the rows where ``mask`` [n] is True."""
    rows: list[int] = mask.nonzero().flatten().tolist()
    return rows


def _reason(*, failed: bool, stopped: bool) -> FinishReason:
    if failed:
        return "error"
    return "stop" if stopped else "length"
