"""New weights that are prepared beside those at work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators import TorchGenerator
from headrace.generators.torch_engine.cpu.runner import FusedRunner
from headrace.generators.torch_engine.forms import can_multiply_int8
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.models.decoder import Decoder
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup, WeightUpdate

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

DEADLINE = 120.0
LONG = 400


class HeldUp(Mapping[str, Tensor]):
    """Tensors that are read up to one of them, and then no further until `go_on`."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str = "") -> None:
        self._tensors, self._name = tensors, name or sorted(tensors)[len(tensors) // 2]
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.num_read = 0

    def __getitem__(self, name: str) -> Tensor:
        self.num_read += 1
        if name == self._name:
            self.reached.set()
            assert self.go_on.wait(DEADLINE)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def held_up(update: WeightUpdate) -> tuple[WeightUpdate, HeldUp]:
    tensors = HeldUp(update.tensors)
    return replace(update, tensors=tensors), tensors


def long_decoder(lab: Lab, seed: int = 0, **changes: object) -> Decoder:
    return lab.decoder(seed, max_position_embeddings=1024, **changes)


def check(lab: Lab, work: Callable[[TorchGenerator], Awaitable[None]], **options: object) -> None:
    """Run ``work`` with a generator that holds version 1, and close it."""

    async def main() -> None:
        decoder = options.pop("decoder", None) or long_decoder(lab)
        assert isinstance(decoder, Decoder)
        generator = lab.generator(decoder.config, **{"staged_updates": True, **options})
        await generator.update_weights(lab.update(decoder))
        try:
            await asyncio.wait_for(work(generator), DEADLINE)
        finally:
            await generator.close()

    asyncio.run(main())


async def steps(generator: TorchGenerator, count: int) -> None:
    first = generator._engine.num_steps
    while generator._engine.num_steps < first + count:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


class Call:
    """An open call of rollouts that take long until they are waited for."""

    def __init__(self, lab: Lab, generator: TorchGenerator, request: GenerationRequest) -> None:
        self._in_haste = lab.slow_down(generator)
        self._groups = asyncio.ensure_future(lab.collect(generator, [request]))

    def __await__(self) -> Generator[Any, None, dict[str, RolloutGroup]]:
        self._in_haste.set()
        return self._groups.__await__()


async def begin(lab: Lab, generator: TorchGenerator, name: str = "a", **kw: object) -> Call:
    """Return the open call of rollouts that have begun."""
    call = Call(lab, generator, lab.request(name, **{"size": 3, "max_tokens": LONG, **kw}))
    await steps(generator, 3)
    return call


def spans(rollout: Rollout) -> list[int]:
    return [span.policy_version for span in rollout.version_spans]


@pytest.mark.parametrize("head_dim", [32, 8])
def test_rollouts_go_on_while_weights_are_prepared_and_no_token_is_of_a_mixture(
    lab: Lab, head_dim: int
) -> None:
    old, new = (long_decoder(lab, seed, head_dim=head_dim) for seed in (0, 1))

    async def work(generator: TorchGenerator) -> None:
        runner = generator._engine._engine._runner
        assert isinstance(runner, FusedRunner) == (head_dim == 32)
        call = await begin(lab, generator)
        update, tensors = held_up(lab.update(new, 2))
        updating = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.to_thread(tensors.reached.wait, DEADLINE)
        await steps(generator, 5)
        assert not updating.done()
        tensors.go_on.set()
        await updating
        for rollout in (await call)["a"].rollouts:
            assert spans(rollout) == [1, 2]
            assert rollout.version_spans[0].end > 5
            _assert_from(lab, old, new, rollout)

    check(lab, work, decoder=old, on_update="recompute")


def _assert_from(lab: Lab, old: Decoder, new: Decoder, rollout: Rollout) -> None:
    """Each token has the log-prob that the weights of its version give it."""
    for span, decoder in zip(rollout.version_spans, (old, new), strict=True):
        logits = lab.logits(decoder, (3, 1, 4), rollout.completion_ids)
        ids = torch.tensor(rollout.completion_ids).unsqueeze(1)
        expected = torch.log_softmax(logits, -1).gather(1, ids).squeeze(1)
        found = torch.tensor(rollout.generator_logprobs)
        gap = (expected - found)[span.start : span.end].abs().max()
        assert float(gap) < 1e-3


@pytest.mark.parametrize("options", [{"is_quantized": True}, {"dtype": torch.bfloat16}, {}])
def test_what_is_sampled_after_an_exchange_is_what_a_cold_engine_samples(
    lab: Lab, options: dict[str, object]
) -> None:
    if options.get("is_quantized") and not can_multiply_int8(torch.device("cpu")):
        pytest.skip("this processor has no exact products of eight bits")
    request = lab.request("b", size=2, max_tokens=20)
    dtype = options.get("dtype", torch.float32)

    def decoder(seed: int) -> Decoder:
        made: Decoder = long_decoder(lab, seed).to(dtype)
        return made

    cold = [lab.run(decoder(seed), [request], **options)["b"] for seed in (1, 2)]

    async def work(generator: TorchGenerator) -> None:
        for seed in (1, 2):
            call = await begin(lab, generator)
            await generator.update_weights(lab.update(decoder(seed), seed + 1))
            found = (await lab.collect(generator, [request]))["b"]
            await call
            for one, other in zip(found.rollouts, cold[seed - 1].rollouts, strict=True):
                assert one.completion_ids == other.completion_ids
                assert spans(one) == [seed + 1]

    check(lab, work, decoder=decoder(0), on_update="keep", **options)


def test_what_is_asked_after_an_update_waits_for_its_weights(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        update, tensors = held_up(lab.update(long_decoder(lab, 1), 2))
        updating = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.to_thread(tensors.reached.wait, DEADLINE)
        later = asyncio.ensure_future(lab.collect(generator, [lab.request("b")]))
        await steps(generator, 12)
        assert not later.done(), "eight tokens would have been sampled by now"
        tensors.go_on.set()
        await updating
        assert spans((await later)["b"].rollouts[0]) == [2]
        await call

    check(lab, work, on_update="keep")


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_unfinished_rollouts_follow_the_policy(lab: Lab, on_update: OnUpdate) -> None:
    expected = {"wait": [1], "keep": [1, 2], "recompute": [1, 2], "restart": [2]}

    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        await generator.update_weights(lab.update(long_decoder(lab, 1), 2))
        assert all(spans(r) == expected[on_update] for r in (await call)["a"].rollouts)

    check(lab, work, on_update=on_update)


def test_a_wrong_checksum_leaves_the_old_weights_and_what_runs_on_them(lab: Lab) -> None:
    request = lab.request("a", size=3, max_tokens=LONG)
    expected = lab.run(long_decoder(lab), [request])

    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        update = lab.update(long_decoder(lab, 1), 2)
        with pytest.raises(WeightSyncError, match="version 2 was not loaded: checksum"):
            await generator.update_weights(replace(update, checksum=update.checksum + 1))
        lab.assert_alike(await call, expected)

    check(lab, work, on_update="keep")


def test_a_weight_that_is_not_held_as_it_came_is_never_exchanged(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(generator: TorchGenerator) -> None:
        runner = generator._engine._engine._runner
        assert isinstance(runner, ModelRunner)
        call = await begin(lab, generator)
        spare = runner._new_weights()
        load = spare.load

        def lossy(tensors: Mapping[str, Tensor]) -> None:
            lost = "model.layers.1.mlp.up_proj.weight"
            load({**tensors, lost: torch.zeros_like(tensors[lost])})

        spare.load = lossy  # type: ignore[method-assign]
        monkeypatch.setattr(runner, "_new_weights", lambda: spare)
        with pytest.raises(WeightSyncError, match="up_proj"):
            await generator.update_weights(lab.update(long_decoder(lab, 1), 2))
        assert all(spans(rollout) == [1] for rollout in (await call)["a"].rollouts)

    check(lab, work, on_update="keep")


def test_a_cancelled_update_returns_once_its_tensors_are_read_no_more(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        update, tensors = held_up(lab.update(long_decoder(lab, 1), 2))
        updating = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.to_thread(tensors.reached.wait, DEADLINE)
        updating.cancel()
        await steps(generator, 5)
        assert not updating.done(), "a tensor is being read"
        tensors.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        num_read = tensors.num_read
        assert all(spans(rollout) == [1] for rollout in (await call)["a"].rollouts)
        assert tensors.num_read == num_read

    check(lab, work, on_update="keep")


def test_closing_answers_an_update_that_is_being_prepared(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        update, tensors = held_up(lab.update(long_decoder(lab, 1), 2))
        updating = asyncio.ensure_future(generator.update_weights(update))
        await asyncio.to_thread(tensors.reached.wait, DEADLINE)
        closing = asyncio.ensure_future(generator.close())
        tensors.go_on.set()
        await closing
        with pytest.raises(WeightSyncError, match="version 2: the generator was closed"):
            await updating
        with pytest.raises(GeneratorFailure, match="was closed"):
            await call

    check(lab, work, on_update="keep")


def test_two_copies_take_turns_and_an_idle_engine_needs_only_one(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        runner = generator._engine._engine._runner
        assert isinstance(runner, ModelRunner)
        first = runner._weights
        await generator.update_weights(lab.update(long_decoder(lab, 1), 2))
        assert runner._staged is None, "nothing runs, so nothing is prepared beside it"
        call = await begin(lab, generator)
        held = set()
        for version in range(3, 7):
            await generator.update_weights(lab.update(long_decoder(lab, version), version))
            held.add(id(runner._weights))
        assert len(held) == 2
        assert id(first) in held
        metrics = generator.metrics()
        assert metrics["generator/weights/staging_seconds"] > 0.0
        assert metrics["generator/weights/max_stall_seconds"] > 0.0
        await call

    check(lab, work, on_update="keep")


def test_without_the_setting_weights_are_replaced_where_they_lie(lab: Lab) -> None:
    async def work(generator: TorchGenerator) -> None:
        call = await begin(lab, generator)
        await generator.update_weights(lab.update(long_decoder(lab, 1), 2))
        runner = generator._engine._engine._runner
        assert isinstance(runner, ModelRunner)
        assert runner._staged is None
        assert all(spans(rollout) == [1, 2] for rollout in (await call)["a"].rollouts)

    check(lab, work, on_update="keep", staged_updates=False)
