"""`headrace train` as a process: what it leaves behind, and that a seed decides all of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from lab import Command, Lab
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

LAST = "checkpoints/step-000008"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(run: Path) -> bytes:
    return (run / LAST / "hf/model.safetensors").read_bytes()


def completions(run: Path) -> list[Any]:
    files = sorted((run / "rollouts").glob("*.parquet"))
    assert files
    return [pq.read_table(path).to_pydict() for path in files]


def test_a_run_leaves_everything_the_design_names(finished: Path) -> None:
    found = {str(path.relative_to(finished)) for path in finished.rglob("*")}

    files = {"config.json", "metrics.jsonl", "events.jsonl", "ledger.sqlite", "report.html"}
    assert found >= files | {f"rollouts/step-{step:06d}.parquet" for step in range(1, 9)}
    assert found >= {f"rollouts/eval-{step:06d}.parquet" for step in (0, 4, 8)}
    kept = {path.name for path in (finished / "checkpoints").iterdir()}
    assert kept == {"step-000006", "step-000008"}
    metrics = lines(finished / "metrics.jsonl")
    assert [line["step"] for line in metrics if line["kind"] == "step"] == list(range(1, 9))
    evaluations = [line for line in metrics if line["kind"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [0, 4, 8]
    assert evaluations[0]["sampling"]["greedy"]["temperature"] == 0


def test_the_reward_rises(finished: Path) -> None:
    steps = [line for line in lines(finished / "metrics.jsonl") if line["kind"] == "step"]
    rewards = [line["metrics"]["verifier/reward/raw_mean"] for line in steps]

    assert rewards[0] < 0.4
    assert rewards[-1] > 0.8


def test_each_prompt_is_settled_once_an_epoch(finished: Path) -> None:
    with sqlite3.connect(finished / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT epoch, prompt_id, step FROM settled").fetchall()
    ledger.close()

    assert len(rows) == 8 * 4
    assert len({prompt for epoch, prompt, _ in rows if epoch == 0}) == 14
    assert {epoch for epoch, _, _ in rows} == {0, 1, 2}


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    lab: Lab, finished: Path
) -> None:
    again, other = lab.train("again"), lab.train("other", "--set", "seed=2")
    assert again.wait().status == 0
    assert other.wait().status == 0

    assert weights(lab.folder / "again") == weights(finished)
    assert completions(lab.folder / "again") == completions(finished)
    assert weights(lab.folder / "other") != weights(finished)


def test_a_checkpoint_loads_in_transformers(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - slow to import

    directory = finished / LAST / "hf"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    saved = load_file(directory / "model.safetensors")
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in saved.items())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("1+1=", add_special_tokens=False)["input_ids"]) == "1+1="


# --- the other verbs, on that run ---------------------------------------------------------------


def test_eval_measures_a_checkpoint_and_prints_one_object(
    lab: Lab, finished: Path, headrace: Command
) -> None:
    ended = headrace("eval", lab.recipe, "--model", finished / LAST / "hf", "--json")

    assert ended.status == 0
    printed = json.loads(ended.out)
    last = [line for line in lines(finished / "metrics.jsonl") if line["kind"] == "evaluation"][-1]
    name = "eval/greedy/reward_mean"
    assert printed["metrics"][name] == pytest.approx(last["metrics"][name])
    assert printed["sampling"]["sampled"]["temperature"] == 1.0


def test_report_prints_one_object(finished: Path, headrace: Command) -> None:
    ended = headrace("report", finished, "--json")

    assert ended.status == 0
    assert json.loads(ended.out)["num_steps"] == 8


def test_inspect_shows_the_rollouts_of_a_step(finished: Path, headrace: Command) -> None:
    ended = headrace("inspect", finished, "--step", 3)

    assert ended.status == 0
    assert "step 3: 4 groups" in ended.out


def test_inspect_names_the_steps_there_are(finished: Path, headrace: Command) -> None:
    ended = headrace("inspect", finished, "--step", 99)

    assert ended.status == 2
    assert "99" in ended.err
