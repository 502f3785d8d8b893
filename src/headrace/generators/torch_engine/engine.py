"""The engine: `step` admits, prefills, decodes, samples and retires. Single-threaded.

Continuous batching: a rollout enters between two decode steps as soon as a slot is free and leaves
the moment it ends, so a long one never holds the others. The engine stamps each rollout with the
policy version it was sampled under; weights change only between steps, and in this version of the
engine only while nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from headrace.generators.torch_engine.rollout_state import GroupCollector, RunningRollouts
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.sampling import draw, uniforms
from headrace.generators.torch_engine.scheduler import Branch, Scheduler
from headrace.types import FinishReason, GenerationRequest

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens left out."""


class Engine:
    """Samples rollouts from one copy of the weights."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, decode: Decode) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._decode = decode
        self._running = RunningRollouts()
        self.policy_version: int | None = None

    @property
    def has_work(self) -> bool:
        """Whether any rollout runs or waits."""
        return len(self._running) + len(self._scheduler) > 0

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue every rollout of ``requests``."""
        self._scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[GroupCollector]:
        """Give every running rollout one more token; return the groups that became whole."""
        finished = self._admit(self._scheduler.admit(len(self._running)))
        if len(self._running):
            self._sample(slice(0, len(self._running)), self._runner.decode(self._running))
            finished += self._retire()
        return finished

    def _admit(self, branches: Sequence[Branch]) -> list[GroupCollector]:
        """Prefill ``branches`` and sample their first tokens."""
        if not branches:
            return []
        first = len(self._running)
        self._running.append([ticket for branch in branches for ticket in branch.tickets])
        longest = int((self._running.prompt_length + self._running.max_tokens).max())
        self._runner.reserve(len(self._running), longest)
        self._sample(slice(first, len(self._running)), self._runner.prefill(branches, first))
        return self._retire()

    def _sample(self, rows: slice, logits: torch.Tensor) -> None:
        running = self._running
        uniform = uniforms(running.seed[rows], running.num_generated[rows])
        sampling = running.sampling.at(rows).to(logits.device)
        token_ids, logprobs = draw(logits, sampling, uniform.to(logits.device))
        running.record(rows, token_ids.cpu(), logprobs.cpu())

    def _retire(self) -> list[GroupCollector]:
        """Take ended rollouts out and close the gaps; return the groups that became whole."""
        running = self._running
        stopped = running.stopped() | self._hit_stop_string()
        ended = stopped | (running.num_generated >= running.max_tokens)
        if not bool(ended.any()):
            return []
        whole = [
            running.tickets[row].collector
            for row in ended.nonzero().flatten().tolist()
            if self._collect(row, "stop" if bool(stopped[row]) else "length")
        ]
        self._close_gaps(ended)
        return whole

    def _collect(self, row: int, reason: FinishReason) -> bool:
        assert self.policy_version is not None
        rollout = self._running.finished(row, reason, self.policy_version)
        return self._running.tickets[row].collector.add(rollout)

    def _close_gaps(self, ended: torch.Tensor) -> None:
        """Move rollouts from the end into the ended ones' slots: one copy for each gap."""
        num_left = int((~ended).sum())
        rows = torch.arange(num_left)
        gaps = ended[:num_left].nonzero().flatten()
        movers = (~ended[num_left:]).nonzero().flatten() + num_left
        lengths = self._running.cached_length
        for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
            self._runner.move(mover, gap, int(lengths[mover]))
        rows[gaps] = movers
        self._running.keep(rows)

    def _hit_stop_string(self) -> torch.Tensor:
        """[n] bool: the newest token completed one of the rollout's stop strings."""
        hit = torch.zeros(len(self._running), dtype=torch.bool)
        if not self._running.any_stop_strings:
            return hit
        for row, ticket in enumerate(self._running.tickets):
            strings = ticket.request.sampling.stop_strings
            if strings:
                hit[row] = self._ends_with_any(row, strings)
        return hit

    def _ends_with_any(self, row: int, strings: Sequence[str]) -> bool:
        # Every token holds at least one byte, so this many tokens hold any stop string and the
        # character before it; the rest of the completion was searched at earlier steps.
        window = max(len(string.encode()) for string in strings) + 4
        length = int(self._running.num_generated[row])
        tail = self._running.token_ids[row, max(0, length - window) : length].tolist()
        text = self._decode(tail)
        return any(string in text for string in strings)

    def abort(self) -> None:
        """Forget everything that runs or waits."""
        self._scheduler.clear()
        self._running = RunningRollouts()
