"""The calls that a rollout needs until it has ended: one, unless something comes between.

Owns the promise that no prompt is lost: what a server cannot finish goes on, from the tokens that
came back, at a server that can, or the failure names every server and its cause. A rollout that is
only slow is never drawn again: that would prefer short ones.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence

from headrace.config import SGLangConfig
from headrace.config.sglang_rules import asks_support
from headrace.errors import GeneratorFailure
from headrace.generators.failure_watch import FailureWatch
from headrace.generators.sglang.client import ServerBusy, ServerLost, delay
from headrace.generators.sglang.draft import Draft
from headrace.generators.sglang.gate import Gate
from headrace.generators.sglang.reply import Call, Sampled, read_reply
from headrace.generators.sglang.sampling import wire_sampling
from headrace.generators.sglang.servers import Member, OpenCall, least_open, usable
from headrace.generators.sglang.statistics import Statistics
from headrace.types import GenerationRequest


class OpenRollout:
    """A rollout of an open `generate`."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.task: asyncio.Task[None] | None = None
        self.member: Member | None = None
        self.call: OpenCall | None = None
        """Made at ``member``, the last one used, and not over yet."""
        self.is_interrupted = False
        """Whether its call was told to end early."""


class OpenGroup:
    """The rollouts of one request of an open `generate`. They stay together, to share a prefix."""

    def __init__(self, request: GenerationRequest, rollouts: Sequence[OpenRollout]) -> None:
        self.request = request
        self.rollouts = rollouts
        self.member: Member | None = None
        self.is_aborted = False
        self.failure: GeneratorFailure | None = None
        """Why it cannot be finished, where that is not a rollout's own failure."""

    def fail(self, failure: GeneratorFailure) -> None:
        """End it with ``failure``, unless all its rollouts have ended."""
        tasks = [rollout.task for rollout in self.rollouts if rollout.task is not None]
        if not all(task.done() for task in tasks):
            self.failure = failure
        for task in tasks:
            task.cancel()


class Calls:
    """Makes the calls of all open rollouts."""

    def __init__(self, members: Sequence[Member], options: SGLangConfig, *, max_open: int) -> None:
        self.members = members
        self.gate = Gate()
        """Held while no call may be made: during a pause and while weights change."""
        self.versions: dict[str, int] = {}
        """Policy version by the name under which it was published."""
        self.name: str | None = None
        """Of the version that is sampled from; None when there is none to rely on."""
        self.statistics = Statistics()
        self.options = options
        self._failures = FailureWatch()
        self._slots = asyncio.Semaphore(max_open)

    async def finish(self, group: OpenGroup, rollout: OpenRollout) -> None:
        """Sample until ``rollout`` has ended, or its group is taken back.

        Waits for a slot, which every ended call frees, for the gate, and for the server.
        """
        began, num_retries = time.monotonic(), 0
        while rollout.draft.finish_reason is None and not group.is_aborted:
            try:
                await self._next_call(group, rollout)
            except (ServerLost, ServerBusy) as error:
                if not await self._is_same_server(rollout.member, error):
                    continue
                if num_retries == self.options.max_retries:
                    raise
                await asyncio.sleep(delay(num_retries))
                num_retries += 1
                self.statistics.num_retries += 1
        self.statistics.rollout_seconds.append(time.monotonic() - began)

    async def _next_call(self, group: OpenGroup, rollout: OpenRollout) -> None:
        async with self._slots:
            await self.gate.passed()
            rollout.member = self._member_of(group)
            await self._call(rollout, rollout.member)

    def _member_of(self, group: OpenGroup) -> Member:
        """Return the group's server, or another one if it cannot be used any more."""
        if group.member not in usable(self.members, self.name):
            group.member = least_open(self.members, self.name)
        assert group.member is not None
        return group.member

    async def _call(self, rollout: OpenRollout, member: Member) -> None:
        """Make one call and add what it brings.

        Raises ServerLost, ServerBusy, and GeneratorFailure also when too many rollouts have ended
        because their logits were not finite.
        """
        assert self.name is not None
        version = self.versions[self.name]
        rollout.draft.begin(version)
        call, body = self._question(rollout.draft, member)
        http = asyncio.create_task(member.server.post("/generate", body, None))
        open_call = OpenCall(call.rid, http)
        member.calls.add(open_call)
        rollout.call, rollout.is_interrupted = open_call, False
        try:
            reply = await self._answer(member, open_call)
            member.heard_at = time.monotonic()
            sampled = Sampled() if reply is None else read_reply(reply, call, self.versions)
            rollout.draft.add(sampled)
            self._count(call, sampled)
            self._watch(rollout.draft, version)
        finally:
            member.calls.discard(open_call)
            rollout.call = None
            open_call.is_over.set()
        if rollout.draft.finish_reason is None and not rollout.is_interrupted:
            msg = f"{member.url}/generate: it ended a rollout early, unasked"
            raise ServerBusy(msg)

    def _question(self, draft: Draft, member: Member) -> tuple[Call, dict[str, object]]:
        """Return a call and its body.

        Request ids have one length, because SGLang aborts every id that begins with the given one.
        The cache is kept apart by version: no prefix computed under other weights is ever found.
        """
        sampling = draft.request.sampling
        wanted = wire_sampling(sampling, num_begun=len(draft.token_ids), seed=draft.seed)
        call = Call(
            url=member.url,
            rid=uuid.uuid4().hex,
            input_ids=(*draft.request.prompt.token_ids, *draft.token_ids),
            max_new_tokens=sampling.max_tokens - len(draft.token_ids),
            stop_token_ids=sampling.stop_token_ids,
            stop_strings=sampling.stop_strings,
            reports_support=asks_support(sampling),
        )
        body: dict[str, object] = {
            "rid": call.rid,
            "input_ids": list(call.input_ids),
            "sampling_params": wanted,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": self.name,
        }
        if call.reports_support:
            body["return_sampling_mask"] = True
        return call, body

    async def _answer(self, member: Member, call: OpenCall) -> dict[str, object] | None:
        """Return the reply; None if nobody waits for it any more. Time at a standstill is free."""
        try:
            left = self.options.rollout_deadline_seconds
            patience = self.options.control_deadline_seconds
            while not call.http.done():
                shut, began = self.gate.shut_seconds, time.monotonic()
                await asyncio.wait({call.http}, timeout=min(left, patience))
                left -= time.monotonic() - began - (self.gate.shut_seconds - shut)
                if not call.http.done():
                    await self._look_after(member)
                if left <= 0.0 and not call.http.done():
                    self._overdue(member)
            if call.http.cancelled() and call.lost is not None:
                raise ServerLost(call.lost)
            if call.http.cancelled() and call.is_given_up:
                return None
            return call.http.result()
        finally:
            call.http.cancel()  # closes the connection, by which the server drops the request

    async def _look_after(self, member: Member) -> None:
        """Ask a server that has been silent for long whether it generates; else it is lost.

        What is asked at a standstill says nothing.
        """
        shut = self.gate.shut_seconds
        async with member.examining:
            silent = time.monotonic() - member.heard_at
            if member.lost is not None or silent < self.options.control_deadline_seconds:
                return
            if await member.is_well():
                member.heard_at = time.monotonic()
            elif self.gate.shut_seconds == shut:
                member.lose(f"{member.url}/generate: silent for {silent:.0f} s, and it is not well")
                self.statistics.num_lost += 1

    def _overdue(self, member: Member) -> None:
        msg = (
            f"{member.url}/generate: no answer within generator.sglang.rollout_deadline_seconds = "
            f"{self.options.rollout_deadline_seconds:g} from a server that works; raise it, or "
            "lower sampling.max_tokens"
        )
        raise GeneratorFailure(msg)

    async def _is_same_server(self, member: Member | None, error: GeneratorFailure) -> bool:
        """Return whether ``member`` still lives with weights of this run; else it is lost."""
        assert member is not None
        async with member.examining:
            if member.lost is not None:
                return False
            try:
                held = await member.weight_version()
            except GeneratorFailure as again:
                cause = f"{error}; then {again}"
            else:
                if held in self.versions:
                    return True
                cause = f"{error}; then it was launched again, with weight version {held!r}"
            member.lose(cause)
            self.statistics.num_lost += 1
            return False

    def _watch(self, draft: Draft, version: int) -> None:
        if draft.finish_reason is None:
            return
        num_failed = int(draft.finish_reason == "error")
        self.statistics.num_failed += num_failed
        num_running = sum(len(member.calls) for member in self.members)
        self._failures.note(
            num_failed=num_failed, num_ended=1, num_running=num_running, version=version
        )

    def _count(self, call: Call, sampled: Sampled) -> None:
        self.statistics.num_calls += 1
        self.statistics.num_input += len(call.input_ids)
        self.statistics.num_cached += sampled.num_cached


async def stop_call(rollout: OpenRollout) -> None:
    """Return once the open call of ``rollout``, if any, is over, with what it has sampled."""
    if rollout.call is not None and rollout.member is not None:
        rollout.is_interrupted = True
        await rollout.member.interrupt(rollout.call)


async def take_back(rollout: OpenRollout) -> None:
    """Return once ``rollout`` has stopped where it is. Its group must be marked as aborted."""
    assert rollout.task is not None
    if rollout.call is None:
        rollout.task.cancel()
    else:
        await stop_call(rollout)
    await asyncio.wait({rollout.task})
