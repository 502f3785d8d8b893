"""What the vLLM generator is made of, as far as it needs no vLLM."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import VllmConfig
from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.vllm import supervisor as supervising
from headrace.generators.vllm.engine import Delta, EngineDied, UpdateRefused
from headrace.generators.vllm.flight import Flight
from headrace.generators.vllm.processes import SHARED_MEMORY, ProcessTree, is_running
from headrace.generators.vllm.read_back import read_back
from headrace.generators.vllm.segment import Segment, read_segment
from headrace.generators.vllm.settings import VllmSettings, exported
from headrace.generators.vllm.supervisor import Supervisor
from headrace.models.weights import checksum, weight_update
from headrace.types import GenerationRequest, Prompt, Rollout, SamplingParams, VersionSpan


def test_a_segment_holds_the_published_bits_and_is_gone_when_it_is_closed() -> None:
    tensors = {
        "odd": torch.arange(7, dtype=torch.int8),
        "half": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 4),
        "strided": torch.randn(6, 4).T,
    }
    update = weight_update(3, tensors)
    segment = Segment(update)
    read = dict(read_segment(segment.info))
    assert checksum(read.items()) == update.checksum
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    segment.close()
    segment.close()
    with pytest.raises(FileNotFoundError):
        read_segment(segment.info)


def test_a_tree_of_processes_is_killed_whole_and_its_shared_memory_unlinked() -> None:
    child = (
        "import multiprocessing.shared_memory as m, subprocess, sys, time\n"
        "from multiprocessing import resource_tracker\n"
        "s = m.SharedMemory(create=True, size=64)\n"
        "resource_tracker.unregister(s._name, 'shared_memory')\n"
        "below = ['sh', '-c', 'sleep 60 & echo $!; wait']\n"
        "p = subprocess.Popen(below, stdout=subprocess.PIPE, text=True)\n"
        "print(s.name, p.stdout.readline(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        name, grandchild = root.stdout.readline().split()
        assert (SHARED_MEMORY / name).exists()
        tree = ProcessTree.below([root.pid])
        assert {root.pid, int(grandchild)} <= set(tree.pids)
        assert tree.segments == (SHARED_MEMORY / name,)
        tree.end(timeout_seconds=30.0)
        assert not any(is_running(pid) for pid in tree.pids)
        assert not (SHARED_MEMORY / name).exists()
        tree.end(timeout_seconds=30.0)


def test_the_environment_is_put_back_and_what_the_user_set_for_vllm_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    settings = VllmSettings(model=Path(), dtype=torch.float32, num_threads=3)
    with exported(settings.environment()):
        assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        if settings.on_processor:
            assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "VLLM_NO_USAGE_STATS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "7"


def request(begun: tuple[Rollout, ...] = (), **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        group_id="a",
        prompt=Prompt(prompt_id="a", source="test", text="", token_ids=(9,)),
        group_size=2,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        seed=0,
        begun=begun,
    )


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(96 + token) for token in ids if token)


def delta(*ids: int, version: int = 1, reason: str | None = None) -> Delta:
    return Delta(
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        policy_versions=(version,) * len(ids),
        finish_reason=reason,
        num_found=0,
    )


def begun_rollout(*ids: int) -> Rollout:
    return Rollout(
        rollout_index=0,
        completion_ids=ids,
        loss_mask=(True,) * len(ids),
        generator_logprobs=(-2.0,) * len(ids),
        version_spans=(VersionSpan(policy_version=1, start=0, end=len(ids)),),
        finish_reason="abort",
        text="",
    )


def test_a_stop_string_may_begin_in_what_was_sampled_before() -> None:
    flight = Flight.of(request((begun_rollout(1, 2),), stop_strings=("bc",)), 0, letters)
    flight.extend(delta(0, version=2))
    assert flight.finish_reason is None
    flight.extend(delta(3, 4, 5, version=2))
    rollout = flight.to_rollout()
    assert rollout.completion_ids == (1, 2, 0, 3), "what came after the stop string is dropped"
    assert rollout.finish_reason == "stop"
    assert rollout.generator_logprobs == (-2.0, -2.0, -1.0, -1.0)
    assert [(s.policy_version, s.start, s.end) for s in rollout.version_spans] == [
        (1, 0, 2),
        (2, 2, 4),
    ]


def test_a_stop_string_that_the_first_tokens_complete_ends_nothing_then_or_later() -> None:
    flight = Flight.of(request(stop_strings=("ab",), min_tokens=2), 0, letters)
    flight.extend(delta(1, 2, 3))
    assert flight.finish_reason is None
    flight.extend(delta(1, 2, 3))
    assert flight.completion_ids == [1, 2, 3, 1, 2]


def test_a_rollout_that_starts_over_forgets_every_token() -> None:
    flight = Flight.of(request((begun_rollout(1, 2),), forced_prefix=(7,)), 0, letters)
    flight.begin(3)
    assert flight.completion_ids == [1, 2], "what has begun has its prefix"
    flight.start_over()
    flight.begin(3)
    assert (flight.completion_ids, flight.loss_mask, flight.policy_versions) == ([7], [False], [3])


def test_a_begun_rollout_at_its_last_token_has_ended() -> None:
    flight = Flight.of(request((begun_rollout(*range(1, 9)),)), 0, letters)
    assert flight.finish_reason == "length"


class Fused(torch.nn.Module):
    """The parts of a vLLM model that `read_back` looks at."""

    packed_modules_mapping = {"qkv": ["q", "k"]}  # noqa: RUF012 - as vLLM has it

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.qkv = torch.nn.Linear(2, 4, bias=False)
        self.layer.qkv.weight.data = torch.cat(
            [weights["layer.q.weight"], weights["layer.k.weight"]]
        )
        self.layer.norm = torch.nn.RMSNorm(2)
        self.layer.norm.weight.data = weights["layer.norm.weight"].clone()


def test_reading_back_compares_whole_and_fused_weights_and_names_what_differs() -> None:
    published = {
        "layer.q.weight": torch.randn(3, 2),
        "layer.k.weight": torch.randn(1, 2),
        "layer.norm.weight": torch.randn(2),
        "other": torch.randn(1),
    }
    model = Fused(published)
    counts = read_back(model, published, tensor_parallel=False)
    assert counts == {"num_compared": 3, "num_probed": 0, "num_unread": 1}
    assert read_back(model, published, tensor_parallel=True)["num_unread"] == 4
    model.layer.qkv.weight.data[3, 1] += 1e-3
    with pytest.raises(ValueError, match=r"layer\.qkv\.weight as the engine holds it"):
        read_back(model, published, tensor_parallel=False)


class FakeEngine:
    """Starts, loads and dies as the test says."""

    fates: list[str]
    """What each start comes to: ``lives``, ``dies`` or ``refuses``."""
    started: list[FakeEngine]

    def __init__(self, fate: str) -> None:
        self.fate = fate
        self.calls: list[str] = []

    @classmethod
    async def start(cls, _settings: object) -> FakeEngine:
        engine = cls(cls.fates.pop(0))
        cls.started.append(engine)
        return engine

    async def pause(self, *, forget_cache: bool) -> None:
        self.calls.append(f"pause {'clear' if forget_cache else 'keep'}")

    async def load(self, segment: Segment) -> dict[str, int]:
        version = segment.info.policy_version
        self.calls.append(f"load {version}")
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


def test_many_rollouts_that_lose_their_engine_start_one_other(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives", "lives")

    async def main() -> None:
        await supervisor.replace(segment(1), "keep", list)
        await supervisor.pause()
        dead = supervisor.engine
        await asyncio.gather(*(supervisor.revive(dead) for _ in range(5)))
        await supervisor.revive(dead)
        assert supervisor.engine is not dead

    asyncio.run(main())
    assert len(FakeEngine.started) == 2
    assert FakeEngine.started[1].calls == ["pause clear", "load 1"], "a paused one stays paused"


def test_engines_that_die_one_after_another_end_in_an_error(
    fates: Callable[..., Supervisor],
) -> None:
    supervisor = fates("lives", "dies", "dies", "dies", max_restarts=2)

    async def main() -> None:
        await supervisor.replace(segment(1), "keep", list)
        dead = supervisor.engine
        with pytest.raises(GeneratorFailure, match=r"died 3 times .*max_restarts = 2"):
            await supervisor.revive(dead)
        with pytest.raises(GeneratorFailure, match="was not started again"):
            supervisor.require_weights()

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


def test_a_token_from_logits_that_are_no_numbers_ends_its_rollout_in_an_error() -> None:
    flight = Flight.of(request(), 0, letters)
    flight.extend(replace(delta(1, 2, 3), logprobs=(-1.0, float("nan"), -1.0)))
    rollout = flight.to_rollout()
    assert (rollout.completion_ids, rollout.finish_reason) == ((1,), "error")
