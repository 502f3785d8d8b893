"""What the vLLM generator is made of, as far as it needs no vLLM."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.generators.vllm.engine import Delta
from headrace.generators.vllm.flight import Flight
from headrace.generators.vllm.processes import (
    SHARED_MEMORY,
    ProcessTree,
    interrupts_kept_out,
    is_running,
)
from headrace.generators.vllm.read_back import read_back
from headrace.generators.vllm.segment import Segment, read_segment
from headrace.generators.vllm.settings import VllmSettings, exported
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


def test_a_process_that_is_started_without_interrupts_outlives_ctrl_c() -> None:
    with interrupts_kept_out():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        assert child.pid is not None
        status = Path(f"/proc/{child.pid}/status").read_text("utf-8")
        blocked = next(line.split()[1] for line in status.splitlines() if line[:6] == "SigBlk")
        for stop in (signal.SIGINT, signal.SIGTERM):
            assert int(blocked, 16) & (1 << (stop - 1))
            assert stop not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        child.kill()
        child.join(30.0)


def test_a_file_that_somebody_put_into_shared_memory_is_not_the_engines_to_unlink() -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        model = Path(folder, "psm_0")
        model.write_bytes(b"weights")
        child = (
            "import mmap, sys, time\n"
            "file = open(sys.argv[1], 'r+b')\n"
            "memory = mmap.mmap(file.fileno(), 0)\n"
            "print(flush=True)\n"
            "time.sleep(60)\n"
        )
        command = [sys.executable, "-c", child, str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as root:
            assert root.stdout is not None
            root.stdout.readline()
            tree = ProcessTree.below([root.pid])
            tree.end(timeout_seconds=30.0)
        assert model.exists()


def test_a_process_that_got_the_number_of_an_ended_one_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        try:
            before = ProcessTree(started={other.pid: "1"}, segments=())
            assert not before.has(other.pid)
            before.end(timeout_seconds=1.0)
            assert is_running(other.pid)
        finally:
            other.kill()


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


def test_a_rollout_that_starts_over_forgets_every_token_that_was_sampled() -> None:
    flight = Flight.of(request((begun_rollout(1, 2),), forced_prefix=(7,)), 0, letters)
    flight.begin(3)
    assert flight.completion_ids == [1, 2], "what has begun has its prefix"
    flight.start_over(3)
    flight.begin(3)
    assert (flight.completion_ids, flight.loss_mask, flight.policy_versions) == ([7], [False], [3])


def test_leading_tokens_that_were_given_stay_when_a_rollout_starts_over() -> None:
    given = replace(
        begun_rollout(5, 6, 7, 8),
        loss_mask=(False, False, True, False),
        generator_logprobs=(0.0, 0.0, -2.0, 0.0),
    )
    flight = Flight.of(request((given,)), 0, letters)
    flight.start_over(4)
    assert (flight.completion_ids, flight.loss_mask) == ([5, 6], [False, False])
    assert (flight.logprobs, flight.policy_versions) == ([0.0, 0.0], [4, 4])


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


def test_a_token_from_logits_that_are_no_numbers_ends_its_rollout_in_an_error() -> None:
    flight = Flight.of(request(), 0, letters)
    flight.extend(replace(delta(1, 2, 3), logprobs=(-1.0, float("nan"), -1.0)))
    rollout = flight.to_rollout()
    assert (rollout.completion_ids, rollout.finish_reason) == ((1,), "error")
