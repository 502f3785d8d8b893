from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config import DataConfig, ReasoningGymSource
from headrace.data import LoadReport, PromptTokenizer, load_prompts
from headrace.data.procedural import read_task
from headrace.errors import ConfigError, DataError

SHORT: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def source(**changes: Any) -> ReasoningGymSource:  # noqa: ANN401 - any field
    fields = {"type": "reasoning_gym", "task": "chain_sum", "size": 40, "options": SHORT}
    return ReasoningGymSource(**(fields | changes))


def load(
    tokenizer: PromptTokenizer, source: ReasoningGymSource, exclude: frozenset[str] = frozenset()
) -> LoadReport:
    return load_prompts(
        DataConfig(train=source),
        source,
        tokenizer,
        source_name="train",
        needs_answer=True,
        check_answer=None,
        max_context=1024,
        max_tokens=16,
        exclude=exclude,
    )


def test_a_task_gives_the_same_questions_and_answers_every_time() -> None:
    first, second = list(read_task(source(seed=5))), list(read_task(source(seed=5)))
    assert first == second
    assert [row.number for row in first] == list(range(1, 41))
    question, answer = first[0].values["question"], first[0].values["answer"]
    expression = str(question).removesuffix(" =").rpartition(": ")[2]
    assert str(eval(expression)) == answer  # noqa: S307 - a sum of two digits


def test_questions_a_task_repeats_are_counted_and_are_no_fault(tokenizer: PromptTokenizer) -> None:
    report = load(tokenizer, source(size=300))
    texts = [prompt.text for prompt in report.prompts]
    assert len(set(texts)) == len(texts) == 300 - report.num_repeated
    assert report.num_repeated > 0
    assert report.problems == ()
    assert report.prompts[0].metadata.keys() == {"metadata"}


def test_held_out_rows_share_no_question_with_the_rows_trained_on(
    tokenizer: PromptTokenizer,
) -> None:
    trained = frozenset(prompt.text for prompt in load(tokenizer, source(size=30)).prompts)
    # Seed 20 and not 1: the package makes row i from seed + i, so seed 1 would share 29 of 30.
    held_out = load(tokenizer, source(size=30, seed=20), exclude=trained)
    assert held_out.num_excluded >= 10 - held_out.num_repeated
    assert trained.isdisjoint(prompt.text for prompt in held_out.prompts)
    rows = len(held_out.prompts) + held_out.num_excluded + held_out.num_repeated
    assert rows == held_out.num_rows == 30


def test_a_held_out_source_with_nothing_of_its_own_says_how_seeds_overlap(
    tokenizer: PromptTokenizer,
) -> None:
    trained = frozenset(prompt.text for prompt in load(tokenizer, source(size=30)).prompts)
    with pytest.raises(DataError, match="take seeds at least size apart"):
        load(tokenizer, source(size=20, seed=1), exclude=trained)


def test_a_misspelt_task_is_answered_with_the_close_ones() -> None:
    with pytest.raises(ConfigError, match=r'task = "chain_sums": .* did you mean chain_sum'):
        next(read_task(source(task="chain_sums")))
    with pytest.raises(ConfigError, match=r"not a task of reasoning-gym; .*countdown"):
        next(read_task(source(task="zzzz")))


def test_every_wrong_option_is_named_with_what_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        next(read_task(source(options={"min_trms": 2, "seed": 3, "zzz": 1})))
    assert caught.value.problems == (
        "options.min_trms: not an option of chain_sum; did you mean min_terms?",
        "options.seed: not an option of chain_sum; seed is a key of the source itself",
        (
            "options.zzz: not an option of chain_sum; "
            "allowed: allow_negation, max_digits, max_terms, min_digits, min_terms"
        ),
    )


def test_an_option_the_task_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"options of reasoning_gym task chain_sum .*min_terms"):
        next(read_task(source(options={"min_terms": -2})))


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install .* -e '\.\[envs\]'"):
        next(read_task(source()))


PROGRAM = """
import json, sys
from headrace.config import ReasoningGymSource
from headrace.data.procedural import read_task
source = ReasoningGymSource(type="reasoning_gym", task=sys.argv[1], size=6, seed=3)
print(json.dumps([[row.values["question"], row.values["answer"]] for row in read_task(source)]))
"""


@pytest.mark.parametrize("task", ["word_ladder", "list_functions"])
def test_rows_are_the_same_in_two_processes_whatever_their_hash_seeds(task: str) -> None:
    def rows(hash_seed: str) -> list[list[str]]:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, task],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        made: list[list[str]] = json.loads(ended.stdout)
        return made

    first = rows("1")
    assert first == rows("2")
    assert len({question for question, _ in first}) > 1


@pytest.mark.parametrize(
    ("task", "options", "told"),
    [
        ("chain_sum", {"min_terms": 1.5}, "non-integer"),
        ("word_sorting", {"min_words": 100000, "max_words": 100001}, "Sample larger"),
    ],
)
def test_a_row_the_package_cannot_make_names_task_row_and_options(
    task: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(
        DataError, match=rf"reasoning_gym task {task}, row 1: .*{told}.*options = {{'min_"
    ):
        list(read_task(source(task=task, options=options)))


def test_a_task_that_ends_its_process_or_hangs_is_an_error_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    text = (
        "import dataclasses, os, sys, time\n"
        "@dataclasses.dataclass\n"
        "class Config:\n"
        "    seed: int = 0\n"
        "    size: int = 1\n"
        "class factory: DATASETS = {name: (list, Config) for name in ('dies', 'hangs', 'prints')}\n"
        "class Task:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def __getitem__(self, index):\n"
        "        print('noise')\n"
        "        if self.name == 'dies': sys.stderr.write('out of wool'); os._exit(3)\n"
        "        if self.name == 'hangs': time.sleep(60)\n"
        "        return {'question': 'q', 'answer': 'a', 'metadata': {('x', 1): {2}}}\n"
        "def create_dataset(name, **options): return Task(name)\n"
    )
    (package / "__init__.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(DataError, match=r"task dies, row 1: .*exit status 3.*out of wool"):
        list(read_task(source(task="dies", size=1, options={})))
    (row,) = read_task(source(task="prints", size=1, options={}))
    assert row.values == {"question": "q", "answer": "a", "metadata": {"('x', 1)": [2]}}
    # Of this one alone: on a busy machine the others are late as well.
    monkeypatch.setattr("headrace.data.procedural._ROW_SECONDS", 1)
    with pytest.raises(DataError, match=r"task hangs, row 1: .*longer than 1 s"):
        list(read_task(source(task="hangs", size=1, options={})))
