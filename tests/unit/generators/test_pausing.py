"""The role's other half: standing still, handing back, and going on, also elsewhere."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator, torch_generator
from headrace.models.decoder import Decoder
from headrace.roles import Generator, Interruptible
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

HANG_SECONDS = 240
LONG = 250
"""Tokens of a rollout that is still under way when a command arrives."""


def long_decoder(lab: Lab, seed: int = 0) -> Decoder:
    return lab.decoder(seed, max_position_embeddings=1024)


def check(
    lab: Lab,
    work: Callable[[TorchGenerator], Awaitable[None]],
    *,
    loaded: bool = True,
    **options: object,
) -> None:
    """Run ``work`` with a generator that holds version 1, and close it."""

    async def main() -> None:
        generator = lab.generator(long_decoder(lab).config, **options)
        if loaded:
            await generator.update_weights(lab.update(long_decoder(lab)))
        try:
            await asyncio.wait_for(work(generator), HANG_SECONDS)
        finally:
            await generator.close()

    asyncio.run(main())


Call = asyncio.Future[dict[str, RolloutGroup]]


async def begin(
    lab: Lab,
    generator: TorchGenerator,
    requests: Sequence[GenerationRequest],
    *,
    num_commands: int = 1,
) -> Call:
    """Return the open call once the engine has made some more steps.

    The next one ends when the engine has been sent ``num_commands``, whatever the machine does
    meanwhile: a rollout would come to its end before a test that is held up says anything.
    """
    turns, engine = generator._engine, generator._engine._engine
    step, num_sent, enough, reached = engine.step, 0, threading.Event(), threading.Event()
    last = turns.num_steps + 5

    def noted(put: Callable[[Any], None], command: Any) -> None:  # noqa: ANN401 - one of three
        nonlocal num_sent
        put(command)
        num_sent += reached.is_set()
        if num_sent >= num_commands:
            enough.set()

    def held_up() -> Any:  # noqa: ANN401 - the engine's
        if turns.num_steps >= last:
            reached.set()
            assert enough.wait(HANG_SECONDS), "no command came"
        return step()

    call = asyncio.ensure_future(lab.collect(generator, requests))
    engine.step = held_up  # type: ignore[method-assign]
    turns._inbox = Inbox(turns._inbox, noted)  # type: ignore[assignment]
    await asyncio.to_thread(reached.wait, HANG_SECONDS)
    return call


class Inbox:
    """An engine's inbox, of which somebody hears what is put there."""

    def __init__(self, real: Any, noted: Callable[[Callable[[Any], None], Any], None]) -> None:  # noqa: ANN401 - a queue
        self._real, self._noted = real, noted

    def put(self, command: Any) -> None:  # noqa: ANN401 - a command
        self._noted(self._real.put, command)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as of the queue
        return getattr(self._real, name)


def versions(rollout: Rollout) -> list[int]:
    return [span.policy_version for span in rollout.version_spans]


def test_the_torch_generator_has_both_halves_of_the_role(lab: Lab) -> None:
    generator = lab.generator(lab.config())
    as_generator: Generator = generator
    as_interruptible: Interruptible = generator
    assert as_generator is as_interruptible
    asyncio.run(generator.close())


def test_nothing_is_sampled_while_paused_and_what_follows_is_as_if_nothing_had_happened(
    lab: Lab,
) -> None:
    requests = [lab.request("a", size=3, max_tokens=LONG)]
    later = [lab.request("b", size=2, seed=5)]
    expected = lab.run(long_decoder(lab), [*requests, *later])

    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, requests)
        await asyncio.gather(generator.pause(), generator.pause())
        await generator.pause()
        before = generator._engine.num_steps
        other = asyncio.ensure_future(lab.collect(generator, later))
        await asyncio.sleep(0.1)  # an engine that went on would make many steps
        assert generator._engine.num_steps == before
        assert not call.done()
        assert not other.done()
        await generator.resume()
        await generator.resume()
        lab.assert_alike({**await call, **await other}, expected)

    check(lab, work)


def test_a_pause_before_the_first_weights_and_a_close_while_paused_are_answered(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        await generator.pause()
        await generator.update_weights(lab.update(long_decoder(lab)))
        call = asyncio.ensure_future(lab.collect(generator, [lab.request("a")]))
        await generator.pause()
        await generator.close()
        with pytest.raises(GeneratorFailure, match="closed"):
            await call
        for refused in (generator.pause(), generator.resume()):
            with pytest.raises(GeneratorFailure, match="closed"):
                await refused

    check(lab, work, loaded=False)


def test_a_pause_is_no_hang_however_long_it_takes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(generator: TorchGenerator) -> None:
        await generator.pause()
        call = asyncio.ensure_future(lab.collect(generator, [lab.request("a")]))
        await generator.pause()
        # Enough for a busy machine to make the turn that takes the request.
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", 3.0)
        watched = asyncio.ensure_future(lab.collect(generator, [lab.request("b")]))
        await asyncio.sleep(3.5)
        assert not watched.done()
        monkeypatch.setattr(torch_generator, "STALL_SECONDS", HANG_SECONDS)
        await generator.resume()
        assert "a" in await call
        assert "b" in await watched

    check(lab, work)


def test_paused_time_is_an_idle_cause_of_its_own(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        generator.metrics()
        await generator.pause()
        await asyncio.sleep(0.05)
        read_at = time.monotonic()
        metrics = generator.metrics()
        assert metrics["generator/idle/paused_seconds"] > 0.0
        assert 0.0 < metrics["generator/idle/share"] <= 1.0
        again = generator.metrics()["generator/idle/paused_seconds"]
        assert again <= time.monotonic() - read_at, "what was told is not told again"

    check(lab, work)


# --- handing back -------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
def test_a_group_is_handed_back_at_once_and_goes_on_at_another_generator(
    lab: Lab, paused: bool
) -> None:
    requests = [lab.request(name, size=3, max_tokens=LONG, seed=3) for name in "ab"]
    expected = lab.run(long_decoder(lab), requests)
    begun: list[GenerationRequest] = []

    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, requests)
        if paused:
            await generator.pause()
        await generator.abort(["a"])
        await generator.resume()
        found = await call
        lab.assert_alike({"b": found["b"]}, {"b": expected["b"]})
        assert {rollout.finish_reason for rollout in found["a"].rollouts} == {"abort"}
        assert 0 < len(found["a"].rollouts[0].completion_ids) < LONG
        metrics = generator.metrics()
        assert metrics["generator/engine/num_aborted"] == 3
        begun.append(replace(requests[0], begun=found["a"].rollouts))

    check(lab, work)
    lab.assert_alike(lab.run(long_decoder(lab), begun), {"a": expected["a"]})


def test_unknown_groups_are_named_and_then_nothing_is_handed_back(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, [lab.request("a", max_tokens=LONG)])
        with pytest.raises(GeneratorFailure, match=r"abort b, c: no open generate\(\) call"):
            await generator.abort(["a", "b", "c"])
        await generator.abort([])
        await generator.pause()
        await generator.resume()
        found = await call
        assert found["a"].rollouts[0].finish_reason == "length"
        with pytest.raises(GeneratorFailure, match="abort a"):
            await generator.abort(["a"])  # its call has ended

    check(lab, work)


def test_a_group_that_has_ended_and_was_not_yielded_yet_is_no_error_to_abort(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        stream = generator.generate([lab.request("a", max_tokens=LONG), lab.request("b")])
        assert (await anext(stream)).group_id == "b"
        while generator._engine._engine.has_work:  # noqa: ASYNC110 - as in `begin`
            await asyncio.sleep(0)
        await generator.abort(["a"])
        assert (await anext(stream)).rollouts[0].finish_reason == "length"

    check(lab, work)


def test_both_calls_that_use_one_group_id_yield_it(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        request = lab.request("a", max_tokens=LONG)
        calls = [await begin(lab, generator, [request]) for _ in range(2)]
        await generator.abort(["a"])
        for found in await asyncio.gather(*calls):
            assert found["a"].rollouts[0].finish_reason == "abort"

    check(lab, work)


def test_what_waits_behind_an_update_is_handed_back_as_it_came(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, [lab.request("a", max_tokens=LONG)], num_commands=3)
        update = asyncio.ensure_future(generator.update_weights(lab.update(long_decoder(lab), 2)))
        await asyncio.sleep(0)
        behind = [lab.request("b", size=2), lab.request("c", size=2)]
        other = asyncio.ensure_future(lab.collect(generator, behind))
        await asyncio.sleep(0)
        await generator.abort(["b"])
        await update
        found = await other
        assert [(r.completion_ids, r.finish_reason) for r in found["b"].rollouts] == [
            ((), "abort")
        ] * 2
        assert [versions(rollout) for rollout in found["c"].rollouts] == [[2], [2]]
        assert versions((await call)["a"].rollouts[0]) == [1]

    check(lab, work)


def test_a_request_whose_rollouts_have_ended_is_answered_without_the_engine(lab: Lab) -> None:
    request = lab.request("a", size=2)
    ended = lab.run(lab.decoder(), [request])["a"].rollouts

    async def work(generator: TorchGenerator) -> None:
        await generator.pause()
        answered = replace(request, begun=ended)
        stream = generator.generate([lab.request("b"), answered])
        assert (await anext(stream)).rollouts == ended
        await generator.resume()
        assert (await anext(stream)).group_id == "b"

    check(lab, work)


CHILD = """
import asyncio, pickle, sys
import torch
from headrace.compute import ComputeThread
from headrace.generators import TorchGenerator
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import weight_update

shape, tensors, requests = pickle.load(sys.stdin.buffer)
tensors = {name: torch.tensor(values) for name, values in tensors.items()}

def decode(ids):
    return "".join(chr(64 + token) for token in ids if token)

async def main():
    compute = ComputeThread("generator", 1)
    config = DecoderConfig.from_hf(shape)
    generator = TorchGenerator(config, decode=decode, compute=compute)
    await generator.update_weights(weight_update(1, tensors))
    found = {group.group_id: group async for group in generator.generate(requests)}
    await generator.close()
    compute.close()
    return found

sys.stdout.buffer.write(pickle.dumps(asyncio.run(main())))
"""


def test_a_rollout_goes_on_in_another_process(lab: Lab, shape: dict[str, Any]) -> None:
    decoder = lab.decoder()
    requests = [lab.request("a", size=3, max_tokens=20), lab.request("b", (7,), max_tokens=20)]
    expected = lab.run_out(lab.engine(decoder), requests)
    engine = lab.engine(decoder)
    collectors = engine.submit(requests)
    for _ in range(6):
        engine.step()
    engine.abort(set(collectors))
    begun = [replace(c.request, begun=c.group(lab.decode).rollouts) for c in collectors]
    tensors = {name: weight.tolist() for name, weight in decoder.named_parameters()}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((shape, tensors, begun)),
        capture_output=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, RolloutGroup] = pickle.loads(done.stdout)  # noqa: S301 - of our own child
    lab.assert_alike(found, expected)


# --- weights that change meanwhile ---------------------------------------------------------------


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_weights_that_come_while_paused_follow_the_policy_for_unfinished_rollouts(
    lab: Lab, on_update: OnUpdate
) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, [lab.request("a", size=2, max_tokens=LONG)])
        await generator.pause()
        await generator.update_weights(lab.update(long_decoder(lab, 1), 2))
        assert not call.done()
        await generator.resume()
        for rollout in (await call)["a"].rollouts:
            assert versions(rollout) == ([2] if on_update == "restart" else [1, 2])

    check(lab, work, on_update=on_update)


def test_weights_that_would_wait_for_paused_rollouts_are_refused_with_a_way_out(lab: Lab) -> None:
    requests = [lab.request("a", size=2, max_tokens=LONG)]
    expected = lab.run(long_decoder(lab), requests)

    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, requests)
        await generator.pause()
        update = lab.update(long_decoder(lab, 1), 2)
        words = r"version 2 was not loaded: .*wait.* 2 rollouts.*resume it first, abort.*on_update"
        with pytest.raises(WeightSyncError, match=words):
            await generator.update_weights(update)
        await generator.resume()
        lab.assert_alike(await call, expected)
        await generator.pause()
        await generator.update_weights(update)  # nothing is unfinished
        await generator.resume()
        (rollout,) = (await lab.collect(generator, [lab.request("b")]))["b"].rollouts
        assert versions(rollout) == [2]

    check(lab, work)


def test_a_pause_does_not_leave_an_update_hanging_that_waits_for_rollouts(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, [lab.request("a", max_tokens=LONG)], num_commands=2)
        update = asyncio.ensure_future(generator.update_weights(lab.update(long_decoder(lab), 2)))
        await asyncio.sleep(0)
        await generator.pause()
        with pytest.raises(WeightSyncError, match="resume it first"):
            await update
        await generator.resume()
        assert versions((await call)["a"].rollouts[0]) == [1]

    check(lab, work)


def test_rollouts_that_nobody_waits_for_do_not_hold_up_weights_while_paused(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator, [lab.request("a", max_tokens=LONG)])
        await generator.pause()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await generator.update_weights(lab.update(long_decoder(lab), 2))

    check(lab, work)
