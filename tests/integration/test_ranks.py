"""The whole command with a learner of several ranks: killed, resumed, resharded and exported."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lab import Command, Lab, Running, is_timeless

from headrace.learners.parallel.stored import StoredParts
from headrace.models.checkpoint import load_decoder

pytestmark = pytest.mark.slow

SHORT = ("--set", "num_steps=6", "--set", "data.eval=null")
RANKED = (*SHORT, "--set", "learner.parallel.shards=2")


@pytest.fixture(scope="module")
def ranked(lab: Lab) -> Path:
    """The directory of a run on two ranks that was never interrupted."""
    ended = lab.train("ranked", *RANKED).wait()
    assert ended.status == 0, ended.err
    return lab.folder / "ranked"


def steps(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {name: value for name, value in line["metrics"].items() if is_timeless(name)}
        for line in lines
        if line["kind"] == "step"
    ]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    stored = StoredParts([run / f"checkpoints/step-{step:06d}/sharded"])
    return {name: stored.whole(name) for name in stored.names}


def ranks_of(running: Running) -> list[psutil.Process]:
    below = psutil.Process(running.process.pid).children(recursive=True)
    return [p for p in below if "headrace.learners.parallel.rank" in p.cmdline()]


def settled(run: Path) -> list[Any]:
    with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
        query = "SELECT epoch, prompt_id, step, reason FROM settled WHERE step <= 6"
        return sorted(ledger.execute(query).fetchall())


def events(run: Path, kind: str) -> list[str]:
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["message"] for line in map(json.loads, lines) if line["kind"] == kind]


def kill_all(ranks: list[psutil.Process]) -> None:
    assert ranks
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGKILL)


def assert_same(run: Path, other: Path) -> None:
    # Another test may have gone on with it.
    assert steps(run) == steps(other)[:6]
    assert settled(run) == settled(other)
    expected, found = weights(other, 6), weights(run, 6)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_ranks_that_are_killed_come_back_in_the_same_run_which_ends_as_if_they_had_not_been(
    lab: Lab, ranked: Path
) -> None:
    run = lab.folder / "ranks-killed"
    running = lab.train("ranks-killed", *RANKED, "--set", "faults.backoff_seconds=0.01")
    # Before the first checkpoint, then after one.
    assert running.wait_until(lambda: len(steps(run)) >= 1)
    kill_all(ranks_of(running))
    assert running.wait_until(lambda: len(events(run, "learner_restart")) == 1)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    kill_all(ranks_of(running)[:1])
    ended = running.wait()
    assert ended.status == 0, ended.err
    restarts = events(run, "learner_restart")
    assert len(restarts) == 2
    assert all("was killed by SIGKILL" in told for told in restarts)
    assert_same(run, ranked)


def test_ranks_that_may_not_come_back_end_the_run_which_is_resumed_as_if_it_had_not_ended(
    lab: Lab, ranked: Path
) -> None:
    run = lab.folder / "ranks-not-restarted"
    never = ("--set", "faults.max_learner_restarts=0")
    running = lab.train("ranks-not-restarted", *RANKED, *never)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    kill_all(ranks_of(running))
    ended = running.wait()
    assert ended.status == 1, ended.err
    assert "of the learner" in ended.err
    assert "was killed by SIGKILL" in ended.err
    assert "faults.max_learner_restarts = 0, so the run ends; --resume goes on from" in ended.err
    assert "Traceback" not in ended.err
    assert len(steps(run)) < 6

    resumed = lab.train("ranks-not-restarted", *RANKED, "--resume").wait()
    assert resumed.status == 0, resumed.err
    assert_same(run, ranked)


def test_a_single_rank_in_a_process_of_its_own_comes_back_too(lab: Lab) -> None:
    own = (*SHORT, "--set", "learner.parallel.own_process=true")
    undisturbed = lab.train("own-process", *own).wait()
    assert undisturbed.status == 0, undisturbed.err
    run = lab.folder / "own-process-killed"
    running = lab.train("own-process-killed", *own)
    assert running.wait_until((run / "checkpoints/step-000002").is_dir)
    kill_all(ranks_of(running))
    ended = running.wait()
    assert ended.status == 0, ended.err
    assert len(events(run, "learner_restart")) == 1
    assert_same(run, lab.folder / "own-process")


def test_a_run_goes_on_with_one_rank_and_is_exported_from_shards(
    lab: Lab, ranked: Path, headrace: Command, tmp_path: Path
) -> None:
    exported = headrace("export", ranked, "--output", tmp_path / "model")
    assert exported.status == 0, exported.err
    decoder = load_decoder(tmp_path / "model")
    expected = weights(ranked, 6)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert (tmp_path / "model" / "tokenizer.json").is_file()

    longer = (*SHORT, "--set", "num_steps=7", "--set", "learner.parallel.shards=1")
    resumed = lab.train("ranked", *longer, "--resume").wait()
    assert resumed.status == 0, resumed.err
    assert len(steps(ranked)) == 7
    assert (ranked / "checkpoints/step-000007/hf/model.safetensors").is_file()


def test_what_ranks_cannot_have_is_refused_before_anything_starts(
    lab: Lab, headrace: Command
) -> None:
    tensor = headrace("check", lab.recipe, "--set", "learner.parallel.tensor=3")
    assert tensor.status == 2
    assert "learner.parallel.tensor = 3: it must divide the model's 2 attention heads" in tensor.err
    assert "use 1 or 2" in tensor.err
    lora = ("--set", "learner.lora.rank=4", "--set", "learner.parallel.shards=2")
    adapter = headrace("check", lab.recipe, *lora)
    assert adapter.status == 2
    assert "learner.lora with learner.parallel of 2 ranks" in adapter.err
