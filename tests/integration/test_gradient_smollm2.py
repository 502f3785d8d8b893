"""The gradient of a real model against plain torch, and its checkpoint in transformers' hands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.bench.gradient import gradient_relative_error
from headrace.config import parse_config
from headrace.errors import ModelError
from headrace.models.catalogue import resolve_model
from headrace.models.tokenizer import Tokenizer
from headrace.types import (
    Message,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
)


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return resolve_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))


def group(tokenizer: Tokenizer, question: str, answers: dict[str, float]) -> RolloutGroup:
    draw = random.Random(question)  # noqa: S311 - test data
    rollouts = []
    for index, answer in enumerate(answers):
        ids = tokenizer.encode(answer)
        rollouts.append(
            Rollout(
                rollout_index=index,
                completion_ids=ids,
                loss_mask=(True,) * len(ids),
                generator_logprobs=tuple(-draw.uniform(0.1, 6.0) for _ in ids),
                version_spans=(VersionSpan(policy_version=0, start=0, end=len(ids)),),
                finish_reason="stop",
                text=answer,
            )
        )
    verdicts = tuple(
        Verdict(outcome=Outcome.PASS, reward=reward, verifier="v") for reward in answers.values()
    )
    token_ids = tokenizer.render([Message(role="user", content=question)])
    return RolloutGroup(
        group_id=f"0/{question}",
        prompt=Prompt(prompt_id=question, source="s", text=question, token_ids=token_ids),
        rollouts=tuple(rollouts),
        sampling=SamplingParams(),
        verdicts=verdicts,
    )


@pytest.mark.slow
def test_the_gradient_on_smollm2_is_the_plain_one(directory: Path) -> None:
    config = parse_config(
        {
            "num_steps": 1,
            "model": {"path": str(directory)},
            "data": {"train": {"type": "jsonl", "path": "unused"}},
            "verifier": {"components": {"answer": {"kind": "exact"}}},
            # So small that the groups are split.
            "learner": {"max_tokens_per_microbatch": 64},
        }
    )
    tokenizer = Tokenizer.load(directory)
    groups = [
        group(tokenizer, "12 + 7 =", {"19<|im_end|>": 1.0, "The answer is 18.": 0.0, "1": 0.5}),
        group(tokenizer, "Say yes.", {"yes<|im_end|>": 1.0, "No, I would rather not.": 0.0}),
        group(tokenizer, "Say no.", {"no": 1.0, "never": 1.0}),
    ]
    assert gradient_relative_error(directory, config, groups) < 1e-4
