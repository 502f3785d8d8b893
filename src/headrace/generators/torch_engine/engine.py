"""The engine: `step` admits, prefills, decodes, samples and retires. Single-threaded.

Continuous batching: a rollout enters between two decode steps as soon as a slot is free and leaves
the moment it ends, so a long one never holds the others. The engine stamps each rollout with the
policy version it was sampled under; weights change only between steps, and in this version of the
engine only while nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.torch_engine.rollout_state import GroupCollector, RunningRollouts
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.sampling import draw, uniforms
from headrace.generators.torch_engine.scheduler import Branch, Scheduler
from headrace.models.weights import checksum
from headrace.types import FinishReason, GenerationRequest, WeightUpdate

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens left out."""


class Engine:
    """Samples rollouts from one copy of the weights."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, decode: Decode) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._decode = decode
        self._running = RunningRollouts()
        self._policy_version: int | None = None
        self._refusal = "asked to generate before the first update_weights"

    @property
    def has_work(self) -> bool:
        """Whether any rollout runs or waits."""
        return len(self._running) > 0 or not self._scheduler.is_empty

    @property
    def num_running(self) -> int:
        """Rollouts that hold a slot."""
        return len(self._running)

    def load(self, update: WeightUpdate) -> None:
        """Replace every weight and prove that all of them arrived. Only while nothing runs.

        Raises WeightSyncError, after which the engine refuses to sample until a load succeeds.
        """
        assert not self.has_work, "rollouts in flight would mix two versions"
        self._policy_version = None
        self._refusal = f"the weights of version {update.policy_version} did not arrive whole"
        self._runner.load(update.tensors)
        held = checksum(self._runner.weights())
        if held != update.checksum:
            msg = f"checksum {held:x} of the loaded weights, {update.checksum:x} was published"
            raise WeightSyncError(msg)
        self._policy_version = update.policy_version

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GroupCollector]:
        """Queue every rollout of ``requests``; return where each group will be collected.

        Raises GeneratorFailure while there are no whole weights to sample from.
        """
        if self._policy_version is None:
            raise GeneratorFailure(self._refusal)
        return self._scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[GroupCollector]:
        """Give every running rollout one more token; return the groups that became whole."""
        finished = self._admit(self._scheduler.admit(len(self._running)))
        if len(self._running):
            self._sample(slice(0, len(self._running)), self._runner.decode(self._running))
            finished += self._retire()
        return finished

    @torch.inference_mode()
    def drop(self, collectors: AbstractSet[GroupCollector]) -> None:
        """Take back every rollout of ``collectors``, running or waiting."""
        self._scheduler.drop(collectors)
        gone = [ticket.collector in collectors for ticket in self._running.tickets]
        if any(gone):
            self._close_gaps(torch.tensor(gone))

    def abort(self) -> None:
        """Forget everything that runs or waits, and the cache, which may hold what went wrong."""
        self._scheduler.clear()
        self._running = RunningRollouts()
        self._runner.clear_cache()

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
        assert self._policy_version is not None
        rollout = self._running.finished(row, reason, self._policy_version)
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
                hit[row] = self._completed_any(row, strings)
        return hit

    def _completed_any(self, row: int, strings: Sequence[str]) -> bool:
        """Search as much of the tail as can hold a stop string that ends in the newest token."""
        longest = max(len(string) for string in strings)
        length = int(self._running.num_generated[row])
        completion = self._running.token_ids[row, :length].tolist()
        window = 2 * longest + 4
        while True:
            tail = completion[-window:]
            text = self._decode(tail)
            if any(string in text for string in strings):
                return True
            # Special tokens and parts of a character add no text, so tokens cannot be counted on:
            # what lies before the newest one must hold a whole stop string and a broken character.
            if window >= length or len(self._decode(tail[:-1])) > longest:
                return False
            window *= 2
