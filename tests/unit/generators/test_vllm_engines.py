"""A vLLM engine that dies, refuses or is taken from under an update, and who owns what then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
import torch

from headrace.config import VllmConfig
from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm import VllmGenerator, VllmSettings
from headrace.generators.vllm import generator as generating
from headrace.generators.vllm import supervisor as supervising
from headrace.generators.vllm.engine import Delta, EngineDied, UpdateRefused
from headrace.generators.vllm.flight import Flight
from headrace.generators.vllm.segment import Segment
from headrace.generators.vllm.supervisor import Supervisor
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import weight_update
from headrace.types import (
    GenerationRequest,
    OnUpdate,
    Prompt,
    RolloutGroup,
    SamplingParams,
    WeightUpdate,
)


class FakeEngine:
    """Starts, loads and dies as the test says."""

    fates: list[str]
    """Of each start: ``lives``, ``dies``, ``refuses N``, ``hangs at N``, ``starts long``."""
    started: list[FakeEngine]

    def __init__(self, fate: str) -> None:
        self.fate = fate
        self.calls: list[str] = []

    @classmethod
    async def start(cls, _settings: object) -> FakeEngine:
        engine = cls(cls.fates.pop(0))
        cls.started.append(engine)
        if engine.fate == "starts long":
            await asyncio.Event().wait()
        return engine

    async def pause(self, *, forget_cache: bool) -> None:
        self.calls.append(f"pause {'clear' if forget_cache else 'keep'}")

    async def load(self, segment: Segment) -> dict[str, int]:
        version = segment.info.policy_version
        self.calls.append(f"load {version}")
        if self.fate == f"hangs at {version}":
            await asyncio.Event().wait()
        if self.fate == "dies":
            raise EngineDied
        if self.fate == f"refuses {version}":
            msg = "no"
            raise UpdateRefused(msg)
        return {"checksum": segment.info.checksum}

    async def abort(self, ids: Sequence[str]) -> None:
        self.calls.append(f"abort {ids}")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def end(self) -> None:
        self.calls.append("end")


@pytest.fixture
def fates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Supervisor]:
    monkeypatch.setattr(supervising, "VllmEngine", FakeEngine)

    def make(*fates: str, max_restarts: int = 3) -> Supervisor:
        FakeEngine.fates, FakeEngine.started = list(fates), []
        options = VllmConfig(max_restarts=max_restarts)
        return Supervisor(VllmSettings(model=Path(), dtype=torch.float32, options=options))

    return make


def segment(version: int) -> Segment:
    return Segment(weight_update(version, {"w": torch.ones(2)}))


def test_an_update_goes_on_until_an_engine_takes_it(fates: Callable[..., Supervisor]) -> None:
    supervisor = fates("dies", "dies", "lives")
    asyncio.run(supervisor.replace(segment(1), "recompute", list))
    assert [engine.calls[-1] for engine in FakeEngine.started] == ["end", "end", "resume"]
    assert FakeEngine.started[-1].calls == ["pause clear", "load 1", "resume"]
    assert supervisor.policy_version == 1
    assert supervisor.num_restarts == 2


def test_a_refused_update_is_an_error_and_another_engine_gets_the_old_weights(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("refuses 2", "lives")

    async def main() -> None:
        await supervisor.replace(segment(1), "wait", list)
        with pytest.raises(WeightSyncError, match="version 2 was not loaded: no"):
            await supervisor.replace(segment(2), "wait", list)

    asyncio.run(main())
    first, second = FakeEngine.started
    assert first.calls[-1] == "end"
    assert second.calls == ["pause clear", "load 1", "resume"]
    assert supervisor.policy_version == 1
    assert supervisor.num_restarts == 1


def test_many_rollouts_that_lose_their_engine_start_one_other(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives", "lives")

    async def main() -> None:
        await supervisor.replace(segment(1), "keep", list)
        await supervisor.pause()
        dead = await supervisor.ready()
        await asyncio.gather(*(supervisor.revive(dead) for _ in range(5)))
        await supervisor.revive(dead)
        assert await supervisor.ready() is not dead

    asyncio.run(main())
    assert len(FakeEngine.started) == 2
    assert FakeEngine.started[1].calls == ["pause clear", "load 1"], "a paused one stays paused"


def test_engines_that_die_one_after_another_end_in_an_error(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives", "dies", "dies", "dies", max_restarts=2)

    async def main() -> None:
        await supervisor.replace(segment(1), "keep", list)
        dead = await supervisor.ready()
        with pytest.raises(GeneratorFailure, match=r"died 3 times .*max_restarts = 2"):
            await supervisor.revive(dead)
        with pytest.raises(GeneratorFailure, match=r"was not started again.*max_restarts = 2"):
            supervisor.require_weights()
        with pytest.raises(GeneratorFailure, match="was not started again"):
            await supervisor.revive(dead)
        assert len(FakeEngine.started) == 3

    asyncio.run(main())


def test_with_restart_rollouts_start_over_between_the_new_weights_and_the_next_token(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives")
    seen: list[int | None] = []

    def start_over() -> list[str]:
        seen.append(supervisor.policy_version)
        return ["r1"]

    asyncio.run(supervisor.replace(segment(4), "restart", start_over))
    assert FakeEngine.started[0].calls == ["pause clear", "load 4", "abort ['r1']", "resume"]
    assert seen == [4]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not holds():  # noqa: ASYNC110 - the product has no event for tests
            await asyncio.sleep(0)


def is_open(segment: Segment) -> bool:
    return Path(segment.info.path).exists()


def test_an_update_that_is_cancelled_midway_leaves_no_engine_that_passes_for_whole(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("hangs at 2", "lives")
    first, second = segment(1), segment(2)

    async def main() -> None:
        await supervisor.replace(first, "keep", list)
        update = asyncio.ensure_future(supervisor.replace(second, "keep", list))
        await until(lambda: FakeEngine.started[0].calls[-1] == "load 2")
        update.cancel()
        await asyncio.wait({update})
        assert FakeEngine.started[0].calls[-1] == "end"
        await supervisor.ready()

    asyncio.run(main())
    assert FakeEngine.started[1].calls == ["pause clear", "load 1", "resume"]
    assert (is_open(first), is_open(second)) == (True, False)


def test_a_start_that_is_cancelled_before_it_has_weights_leaves_no_engine(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives", "hangs at 1", "lives")

    async def main() -> None:
        await supervisor.replace(segment(1), "keep", list)
        revival = asyncio.ensure_future(supervisor._revive(await supervisor.ready()))
        await until(
            lambda: len(FakeEngine.started) == 2 and "load 1" in FakeEngine.started[1].calls
        )
        revival.cancel()
        await asyncio.wait({revival})
        assert FakeEngine.started[1].calls[-1] == "end"
        assert await supervisor.ready() is FakeEngine.started[2]

    asyncio.run(main())


def test_weights_that_were_installed_stay_when_their_update_fails_afterwards(
    fates: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = fates("lives", "lives")

    async def fails(_self: FakeEngine, _ids: Sequence[str]) -> None:
        msg = "a fault in between"
        raise RuntimeError(msg)

    async def main() -> None:
        monkeypatch.setattr(FakeEngine, "abort", fails)
        installed = segment(1)
        with pytest.raises(RuntimeError, match="a fault in between"):
            await supervisor.replace(installed, "restart", lambda: ["r1"])
        assert is_open(installed)
        await supervisor.ready()
        assert FakeEngine.started[1].calls == ["pause clear", "load 1", "resume"]

    asyncio.run(main())


def test_closing_does_not_wait_for_an_engine_that_is_starting(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("starts long")

    async def main() -> None:
        update = asyncio.ensure_future(supervisor.replace(segment(1), "keep", list))
        await until(lambda: bool(FakeEngine.started))
        await supervisor.close()
        with pytest.raises(GeneratorFailure, match="was closed"):
            await update

    asyncio.run(main())


class FakeStreams(FakeEngine):
    """Answers each request with the deltas that the test wants."""

    answers: Callable[[int], Sequence[Delta | None]]
    """By the number of the request; None waits until the request is taken back."""
    requests: list[tuple[int, ...]]
    taken_back: list[str]

    async def stream(
        self, request_id: str, token_ids: Sequence[int], params: object, salt: str
    ) -> AsyncGenerator[Delta, None]:
        del params, salt
        type(self).requests.append(tuple(token_ids))
        for delta in type(self).answers(len(self.requests)):
            if delta is None:
                await until(lambda: request_id in self.taken_back)
                yield answer(reason="abort")
                return
            yield delta

    async def abort(self, ids: Sequence[str]) -> None:
        await super().abort(ids)
        self.taken_back.extend(ids)


def answer(*ids: int, reason: str | None = None, logprob: float = -1.0) -> Delta:
    return Delta(
        token_ids=ids,
        logprobs=(logprob,) * len(ids),
        policy_versions=(1,) * len(ids),
        finish_reason=reason,
        num_found=0,
    )


SHAPE = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
CONFIG = DecoderConfig.from_hf(SHAPE)

Make = Callable[..., VllmGenerator]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(supervising, "VllmEngine", FakeStreams)
    monkeypatch.setattr(generating, "engine_params", lambda *_, **__: None)
    monkeypatch.setattr(generating, "_PATIENCE_SECONDS", 0.0)

    def made(
        answers: Callable[[int], Sequence[Delta | None]], on_update: OnUpdate = "wait"
    ) -> VllmGenerator:
        FakeStreams.fates, FakeStreams.started = ["lives"] * 9, []
        FakeStreams.answers = staticmethod(answers)
        FakeStreams.requests, FakeStreams.taken_back = [], []
        settings = VllmSettings(model=Path(), dtype=torch.float32)
        return VllmGenerator(CONFIG, decode=str, settings=settings, on_update=on_update)

    return made


def weights(version: int) -> WeightUpdate:
    return weight_update(version, dict(Decoder(CONFIG).named_parameters()))


def asked(name: str = "a", size: int = 1) -> GenerationRequest:
    return GenerationRequest(
        group_id=name,
        prompt=Prompt(prompt_id=name, source="test", text="", token_ids=(9,)),
        group_size=size,
        sampling=SamplingParams(max_tokens=4),
        seed=0,
    )


async def collect(generator: VllmGenerator, *requests: GenerationRequest) -> list[RolloutGroup]:
    return [group async for group in generator.generate(requests)]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_rollout_that_vllm_gives_up_again_and_again_fails_its_group(
    make: Make, reason: str
) -> None:
    generator = make(lambda _: [answer(reason=reason)])

    async def main() -> None:
        await generator.update_weights(weights(1))
        with pytest.raises(GeneratorFailure, match=r"group a: vLLM ended rollout 0 4 times"):
            await collect(generator, asked())
        await generator.close()

    asyncio.run(main())
    assert len(FakeStreams.requests) == generating.MAX_TRIES + 1


def test_a_rollout_that_vllm_gave_up_once_goes_on_from_its_tokens(make: Make) -> None:
    def answers(number: int) -> list[Delta | None]:
        return [answer(5), answer(reason="abort")] if number == 1 else [answer(6, reason="length")]

    generator = make(answers)

    async def main() -> RolloutGroup:
        await generator.update_weights(weights(1))
        (group,) = await collect(generator, asked())
        await generator.close()
        return group

    assert asyncio.run(main()).rollouts[0].completion_ids == (5, 6)
    assert FakeStreams.requests == [(9,), (9, 5)]


def test_an_update_that_waits_is_refused_when_the_generator_is_paused_meanwhile(
    make: Make,
) -> None:
    generator = make(lambda _: [answer(5), None])

    async def main() -> None:
        await generator.update_weights(weights(1))
        call = asyncio.ensure_future(collect(generator, asked()))
        await until(lambda: bool(FakeStreams.requests))
        update = asyncio.ensure_future(generator.update_weights(weights(2)))
        await asyncio.wait({update}, timeout=0.05)
        assert not update.done()
        await generator.pause()
        with pytest.raises(WeightSyncError, match="paused with unfinished rollouts"):
            await asyncio.wait_for(update, 120.0)
        call.cancel()
        await asyncio.wait({call})
        await generator.close()

    asyncio.run(main())


@pytest.mark.parametrize(("on_update", "prompts"), [("keep", 1), ("restart", 2)])
def test_under_keep_only_what_has_sampled_nothing_is_asked_for_again(
    make: Make, on_update: OnUpdate, prompts: int
) -> None:
    def answers(number: int) -> list[Delta | None]:
        begins: list[Delta | None] = [answer(5), None] if number == 1 else [None]
        return begins if number <= 2 else [answer(6, 6, 6, 6, reason="length")]

    generator = make(answers, on_update)

    async def main() -> None:
        await generator.update_weights(weights(1))
        call = asyncio.ensure_future(collect(generator, asked(size=2)))
        await until(lambda: sum(len(f.completion_ids) for f in generator._in_air) == 1)
        await until(lambda: len(FakeStreams.requests) == 2)
        await generator.update_weights(weights(2))
        await until(lambda: len(FakeStreams.requests) == 2 + prompts)
        await generator.abort(["a"])
        await call
        await generator.close()

    asyncio.run(main())
    assert FakeStreams.requests[2:] == [(9,)] * prompts


def test_a_rollout_that_ended_while_its_stream_closes_does_not_start_over(make: Make) -> None:
    generator = make(lambda _: [], "restart")

    async def main() -> None:
        await generator.update_weights(weights(1))
        flight = Flight.of(asked(), 0, str)
        flight.begin(1)
        flight.extend(answer(5, 6, reason="stop"))
        generator._in_air[flight] = "r1"
        assert generator._take_back() == []
        assert (flight.completion_ids, flight.finish_reason) == ([5, 6], "stop")
        await generator.close()

    asyncio.run(main())


def test_rollouts_without_finite_logits_are_counted_and_many_stop_the_run(make: Make) -> None:
    generator = make(lambda _: [answer(5, logprob=float("nan"))])

    async def main() -> None:
        await generator.update_weights(weights(3))
        (group,) = await collect(generator, asked())
        assert group.rollouts[0].finish_reason == "error"
        assert generator.metrics()["generator/engine/num_failed"] == 1
        with pytest.raises(GeneratorFailure, match="policy version 3 were not finite"):
            await collect(generator, asked(size=20))
        await generator.close()

    asyncio.run(main())


def test_restarts_are_counted_since_somebody_last_asked(make: Make) -> None:
    generator = make(lambda _: [])

    async def main() -> None:
        await generator.update_weights(weights(1))
        supervisor = generator._supervisor
        await supervisor.revive(await supervisor.ready())
        counts = [generator.metrics()["generator/engine/num_restarts"] for _ in range(2)]
        assert counts == [1, 0]
        await generator.close()

    asyncio.run(main())


def test_an_update_that_is_cancelled_while_it_is_written_reads_nothing_afterwards(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.generators.vllm import segment as writing  # noqa: PLC0415 - patched below

    generator, made = make(lambda _: []), []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Segment):
        def __init__(self, update: WeightUpdate) -> None:
            begun.set()
            go_on.wait(120.0)
            super().__init__(update)
            made.append(self)

    monkeypatch.setattr(writing, "Segment", Slow)

    async def main() -> None:
        update = asyncio.ensure_future(generator.update_weights(weights(1)))
        await asyncio.to_thread(begun.wait, 120.0)
        update.cancel()
        await asyncio.wait({update}, timeout=0.05)
        assert not update.done()
        go_on.set()
        await asyncio.wait({update})
        assert update.cancelled()

    asyncio.run(main())
    assert not is_open(made[0])
