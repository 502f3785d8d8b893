"""The work of `bench step`, the same for headrace and for its peer.

One step is 64 rollouts: 8 prompts of about 55 tokens (chat template included), 8 rollouts each, at
most 24 new tokens, temperature 1, one update in fp32 on 2 threads. Every step has new prompts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

MODEL = "smollm2-135m"
GROUPS_PER_STEP = 8
GROUP_SIZE = 8
ROLLOUTS_PER_STEP = GROUPS_PER_STEP * GROUP_SIZE
MAX_TOKENS = 24
LEARNING_RATE = 1e-6
NUM_THREADS = 2

_NUM_TERMS = 4

_RECIPE = """\
name = "bench-step"
num_steps = {num_steps}
groups_per_step = {groups_per_step}
group_size = {group_size}
num_threads = {num_threads}

[model]
path = {model}

[data]
shuffle = false

[data.train]
type = "jsonl"
path = "prompts.jsonl"

[sampling]
temperature = 1.0
max_tokens = {max_tokens}

[generator]
dtype = "float32"

[verifier.components.spread]
kind = "function"
path = "headrace.bench.step_reward:reward"

[objective]
advantage = "grpo"
loss = "ppo_clip"
aggregation = "token"

[learner]
compute_dtype = "float32"

[learner.optimizer]
learning_rate = {learning_rate}
"""


def questions(num_steps: int) -> list[str]:
    """Return the prompts of ``num_steps`` steps, all different; a longer list begins the same."""
    source = random.Random(0)  # noqa: S311 - test prompts, not secrets
    found: dict[str, None] = {}
    while len(found) < num_steps * GROUPS_PER_STEP:
        terms = [source.randint(10, 99) for _ in range(_NUM_TERMS)]
        signs = source.choices("+-", k=_NUM_TERMS - 1)
        rest = "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
        found[f"State the final answer to the following arithmetic problem: {terms[0]}{rest} ="] = (
            None
        )
    return list(found)


def write_recipe(folder: Path, model: Path, num_steps: int) -> Path:
    """Write prompts and recipe into ``folder`` and return the recipe's path."""
    rows = [json.dumps({"prompt": question, "answer": ""}) for question in questions(num_steps)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    recipe = folder / "step.toml"
    text = _RECIPE.format(
        num_steps=num_steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        num_threads=NUM_THREADS,
        # A JSON string is a TOML string.
        model=json.dumps(str(model)),
        max_tokens=MAX_TOKENS,
        learning_rate=LEARNING_RATE,
    )
    recipe.write_text(text, encoding="utf-8")
    return recipe
