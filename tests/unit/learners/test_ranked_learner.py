"""A learner whose ranks are processes: what it answers, what leaves it, and what its end leaves."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import RunConfig, WeightSyncConfig
from headrace.errors import CheckpointError, LearnerFailure, NoSignalError, RunError
from headrace.learners import CheckpointStore, PolicySource, TorchLearner
from headrace.learners.parallel.hosts import LocalHosts
from headrace.learners.parallel.learner import RankedLearner
from headrace.learners.parallel.regions import Region
from headrace.learners.parallel.tensor_plan import cut_dimension
from headrace.learners.parallel.weights import tensor_slices
from headrace.models.decoder_config import DecoderConfig
from headrace.models.hf_files import read_hf_config
from headrace.models.weights import checksum, same_bits
from headrace.types import RolloutGroup
from headrace.weight_sync import build_weight_channel

pytestmark = pytest.mark.slow

FAMILY = "qwen3"
SETTINGS: dict[str, object] = {
    "learner__optimizer__learning_rate": 1e-4,
    "learner__max_no_signal_steps": 1,
}
MakeRanked = Callable[..., RankedLearner]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


Run = Callable[[Any], Any]


@pytest.fixture(scope="module")
def run(loop: asyncio.AbstractEventLoop) -> Run:
    return loop.run_until_complete


@pytest.fixture
def make_unstarted(
    model_directory: Callable[[str], Path],
    make_config: Callable[..., RunConfig],
    run: Run,
) -> Iterator[MakeRanked]:
    made: list[RankedLearner] = []

    def make(**settings: object) -> RankedLearner:
        directory = model_directory(FAMILY)
        hf_config = read_hf_config(directory)
        learner = RankedLearner(
            DecoderConfig.from_hf(hf_config, origin="test"),
            PolicySource(directory=directory, hf_config=hf_config),
            make_config(**SETTINGS | {"learner__parallel__shards": 2} | settings),
            num_updates=10,
            hosts=LocalHosts(num_threads=1),
            device=torch.device("cpu"),
        )
        made.append(learner)
        return learner

    yield make
    for learner in made:
        run(learner.close())


@pytest.fixture
def make_ranked(make_unstarted: MakeRanked, run: Run) -> MakeRanked:
    def make(**settings: object) -> RankedLearner:
        learner = make_unstarted(**settings)
        run(learner.start())
        return learner

    return make


class Room:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def take(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
        self.tensors = {name: torch.empty(*shape, dtype=dtype) for name, shape in shapes.items()}
        return self.tensors


def same(found: Tensor, expected: Tensor, bound: float = 1e-5) -> bool:
    return torch.allclose(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


def test_ranks_do_what_one_process_does_from_the_first_step_to_a_loaded_checkpoint(
    batch: list[RolloutGroup],
    make_ranked: MakeRanked,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
    run: Run,
    tmp_path: Path,
) -> None:
    """One story, since every start of the ranks takes seconds."""
    ranked, one = make_ranked(), make_learner(FAMILY, **SETTINGS)

    # A rehearsal leaves nothing behind.
    run(ranked.rehearse(7))
    expected, found = asyncio.run(one.step(batch)), run(ranked.step(batch))
    assert found.policy_version == expected.policy_version == ranked.policy_version == 1
    assert found.metrics == pytest.approx(dict(expected.metrics), rel=1e-4, abs=1e-6)

    # Weights leave whole, or as the slices that a generator of several ranks holds.
    update, theirs = run(ranked.export()), asyncio.run(one.export())
    assert update.tensors.keys() == theirs.tensors.keys()
    assert all(same(update.tensors[name], tensor) for name, tensor in theirs.tensors.items())
    assert update.checksum == checksum(update.tensors.items())
    shapes = {name: tensor.shape for name, tensor in theirs.tensors.items()}
    ranked._room = Room()
    placed = run(ranked.export())
    assert placed.tensors is ranked._room.tensors
    assert placed.checksum == update.checksum == checksum(placed.tensors.items())
    regions = tensor_slices(shapes, cut_dimension, rank=1, count=2)
    slices = ranked.weights(regions)
    for name, region in regions.items():
        part = update.tensors[name][region.within(Region.whole(shapes[name]))]
        assert torch.equal(slices[name], part)

    # Whatever carries them, the same bits arrive.
    for transport in ("shared_memory", "broadcast"):
        channel = build_weight_channel(WeightSyncConfig(transport=transport), None)
        ranked._room = channel.room
        notice = run(channel.store.write(run(ranked.export())))
        assert notice.checksum == update.checksum
        with channel.reader.open(notice) as arrived:
            assert arrived.tensors.keys() == update.tensors.keys()
            for name, tensor in update.tensors.items():
                assert same_bits(arrived.tensors[name], tensor)
        channel.reader.close()
        channel.store.close()
    ranked._room = None

    # An error that all ranks agree on is that error, and they go on.
    flat = make_group([1], [[2], [3]], [0.5, 0.5])
    with pytest.raises(NoSignalError, match="all equal"):
        run(ranked.step([flat]))

    # A checkpoint of ranks is written while they step, and read by one process.
    store = CheckpointStore(tmp_path / "ranked", keep=3, fingerprint="f")
    writing = run(store.begin(1, 1, ranked.save))
    run(ranked.step(batch))
    saved = run(writing)
    resumed = make_learner(FAMILY, **SETTINGS)
    assert asyncio.run(resumed.load(saved.directory)) == 1
    assert all(
        same(resumed_weight, theirs.tensors[name])
        for name, resumed_weight in resumed._decoder.named_parameters()
    )

    # One process's checkpoint is read by ranks, which go on from it.
    ours = asyncio.run(
        CheckpointStore(tmp_path / "one", keep=1, fingerprint="f").save(1, 1, one.save)
    )
    assert run(ranked.load(ours.directory)) == 1
    run(ranked.step(batch))
    asyncio.run(one.step(batch))
    assert_same_weights(ranked, one, run)

    # What is damaged is refused, replaces nothing, and they go on.
    damaged = next((saved.directory / "sharded").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        run(ranked.load(saved.directory))
    assert_same_weights(ranked, one, run)


def assert_same_weights(ranked: RankedLearner, one: TorchLearner, run: Run) -> None:
    found, expected = run(ranked.export()), asyncio.run(one.export())
    assert found.policy_version == expected.policy_version
    assert all(same(found.tensors[name], tensor) for name, tensor in expected.tensors.items())


# --- faults -----------------------------------------------------------------------------------


def pids_of(learner: RankedLearner) -> tuple[int, ...]:
    return learner._ranks.pids


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def step_and(
    learner: RankedLearner, batch: list[RolloutGroup], meanwhile: Callable[[], None]
) -> None:
    stepping = asyncio.create_task(learner.step(batch))
    await asyncio.sleep(0.3)
    assert not stepping.done()
    meanwhile()
    await stepping


def test_a_rank_that_dies_in_a_step_ends_all_and_is_named_with_how_and_its_last_words(
    batch: list[RolloutGroup], make_ranked: MakeRanked, run: Run
) -> None:
    learner = make_ranked()
    first, second = pids_of(learner)
    os.kill(first, signal.SIGSTOP)  # so that the step cannot end before the kill

    def kill() -> None:
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGCONT)

    expected = rf"rank 1 of the learner \(process {second}\) was killed by SIGKILL during a step"
    with pytest.raises(LearnerFailure, match=expected):
        run(step_and(learner, batch, kill))
    assert not is_there(first)
    assert not is_there(second)
    with pytest.raises(LearnerFailure, match=expected):
        run(learner.step(batch))


def test_a_rank_that_hangs_ends_all_at_the_deadline_and_is_named(
    batch: list[RolloutGroup], make_ranked: MakeRanked, run: Run
) -> None:
    learner = make_ranked(learner__parallel__timeout_seconds=30.0)
    learner._ranks._timeout = 2.0  # of what follows; the start takes longer on a busy machine
    first, second = pids_of(learner)
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(
        LearnerFailure, match=rf"^rank 1 \(process {second}\) is stopped.* no answer during a step"
    ):
        run(learner.step(batch))
    assert not is_there(first)
    assert not is_there(second)


def test_ranks_that_cannot_start_say_why(
    make_ranked: MakeRanked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(
        RunError, match=r"rank \d of the learner .* ended with exit status 1 during the start"
    ) as ended:
        make_ranked()
    assert not isinstance(ended.value, LearnerFailure), "it would say the same again"


PARENT = """
import asyncio, pickle, sys, time
from headrace.learners.parallel.hosts import LocalHosts
from headrace.learners.parallel.processes import RankProcesses

settings = pickle.load(open(sys.argv[1], "rb"))
ranks = RankProcesses(settings, LocalHosts(num_threads=1), timeout_seconds=200.0)
asyncio.run(ranks.start())
print(*ranks.pids, flush=True)
time.sleep(600)
"""


def test_ranks_die_with_the_process_that_started_them_even_where_they_hang(
    make_unstarted: MakeRanked, tmp_path: Path
) -> None:
    settings = tmp_path / "settings"
    settings.write_bytes(pickle.dumps(make_unstarted()._ranks._settings))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(settings)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60.0
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)
