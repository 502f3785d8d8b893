"""`headrace verify --kind code`, and the shipped programming tasks, in the sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from lab import Command

import headrace as package
from headrace.config import CodeConfig, SandboxConfig, load_config
from headrace.errors import ConfigError
from headrace.recipes import find_recipe
from headrace.types import Prompt
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.sandbox.execution import Executor
from headrace.verifiers.sandbox.tiers import build_executor

ROWS = Path(package.__file__).parent / "recipes" / "code" / "train.jsonl"


@pytest.fixture(scope="module")
def sandbox() -> Executor:
    try:
        return build_executor(SandboxConfig(num_cells=1))
    except ConfigError as error:
        pytest.skip(f"no tier of the sandbox works here: {error}")


def files(folder: Path, row: object, completion: str) -> tuple[object, ...]:
    task, answer = folder / "task.json", folder / "answer.txt"
    task.write_text(json.dumps(row), encoding="utf-8")
    answer.write_text(completion, encoding="utf-8")
    return ("verify", "--kind", "code", "--task", task, "--answer", answer)


@pytest.mark.usefixtures("sandbox")
def test_verify_grades_a_program_by_a_row(tmp_path: Path, headrace: Command) -> None:
    row = {"test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    ended = headrace(*files(tmp_path, row, "```python\ndef add(a, b):\n    return a + b\n```"))
    assert ended.status == 0, ended.err
    verdict = json.loads(ended.out)
    assert (verdict["reward"], verdict["outcome"]) == (1.0, "pass")


@pytest.mark.usefixtures("sandbox")
def test_verify_explains_each_test_and_takes_settings(tmp_path: Path, headrace: Command) -> None:
    row = {
        "tests": [{"input": "1", "output": "1"}, {"input": "2", "output": "3", "visible": False}],
        "verifier": {"extract": "whole", "stop_when_settled": False},
    }
    ended = headrace(*files(tmp_path, row, "print(input())"), "--explain")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["outcome"] == "wrong"
    assert "wrote '2\\n' against '3'" in ended.err
    assert "held-out 1" in ended.err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tests": []}, "tests: no test at all"),
        ({"prompt": "x"}, "tests: no column that holds tests"),
        ({"tests": [], "verifier": {"credits": "all"}}, "verifier.credits: "),
        ({"tests": [], "verifier": 3}, "must be an object"),
        ({"tests": [], "sandbox": {"tier": "jail"}}, "sandbox.tier: "),
        ([], "must be a JSON object"),
    ],
)
def test_a_task_that_cannot_be_graded_is_a_user_error(
    row: object, reason: str, tmp_path: Path, headrace: Command
) -> None:
    ended = headrace(*files(tmp_path, row, "x"))
    assert ended.status == 2
    assert reason in ended.err


def test_every_shipped_programming_task_is_solved_by_its_solution(sandbox: Executor) -> None:
    config = load_config(find_recipe("smollm2-code")).verifier.components["tests"]
    assert isinstance(config, CodeConfig)
    component = CodeComponent(config, sandbox)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]

    async def rewards() -> list[float | None]:
        found = []
        for row in rows:
            prompt = Prompt(
                prompt_id=row["id"], source="train", text="", token_ids=(0,), metadata=row
            )
            score = await component.score(prompt, f"```python\n{row['solution']}\n```")
            found.append(score.reward)
        await component.close()
        return found

    assert asyncio.run(rewards()) == [1.0] * 12
