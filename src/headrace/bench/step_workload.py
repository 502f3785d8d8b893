"""The work of `bench step`, the same for headrace and for its peer.

One step of the large workload is 64 rollouts of SmolLM2-135M: 8 prompts of about 55 tokens (chat
template included), 8 rollouts each, at most 24 new tokens, temperature 1, one update, on 2 threads.
That of the small one is as many rollouts of at most 16 tokens by the bundled nano model, in fp32,
where everything around the arithmetic shows. Every step has new prompts.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MODEL = "smollm2-135m"
GROUPS_PER_STEP = 8
GROUP_SIZE = 8
ROLLOUTS_PER_STEP = GROUPS_PER_STEP * GROUP_SIZE
MAX_TOKENS, NANO_MAX_TOKENS = 24, 16
LEARNING_RATE = 1e-6
NUM_THREADS = 2

_NUM_TERMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, and how."""

    model: Path
    num_steps: int
    is_chat: bool = True
    """Whether prompts go through the model's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the generator, and of the learner's products over masters in fp32."""
    pays_answers: bool = False
    """Whether right answers are paid, so that many groups have no spread; else every completion
    is paid differently and no group is left out."""
    max_tokens: int = MAX_TOKENS

    @property
    def questions(self) -> list[tuple[str, str]]:
        """Prompts and answers of all steps, all different; those of more steps begin the same."""
        make = _sentence if self.is_chat else _sum
        source = random.Random(0)  # noqa: S311 - test prompts, not secrets
        found: dict[str, str] = {}
        while len(found) < self.num_steps * GROUPS_PER_STEP:
            question, answer = make(source)
            found.setdefault(question, answer)
        return list(found.items())


def _sentence(source: random.Random) -> tuple[str, str]:
    terms = [source.randint(10, 99) for _ in range(_NUM_TERMS)]
    signs = source.choices("+-", k=_NUM_TERMS - 1)
    pairs = list(zip(signs, terms[1:], strict=True))
    rest = "".join(f" {sign} {term}" for sign, term in pairs)
    answer = terms[0] + sum(term if sign == "+" else -term for sign, term in pairs)
    question = f"State the final answer to the following arithmetic problem: {terms[0]}{rest} ="
    return question, str(answer)


def _sum(source: random.Random) -> tuple[str, str]:
    """In the letters that the nano model knows."""
    terms = [source.randint(1, 9) for _ in range(5)]
    return "+".join(map(str, terms)) + "=", str(sum(terms))


_RECIPE = """\
name = "bench-step"
num_steps = {num_steps}
groups_per_step = {groups_per_step}
group_size = {group_size}
num_threads = {num_threads}
device = "cpu"

[model]
path = {model}

[data]
shuffle = false
template = "{template}"

[data.train]
type = "jsonl"
path = "prompts.jsonl"

[sampling]
temperature = 1.0
max_tokens = {max_tokens}

[generator]
dtype = "{dtype}"

[verifier.components.reward]
{verifier}

[objective]
advantage = "grpo"
loss = "ppo_clip"
aggregation = "token"

[learner]
compute_dtype = "{dtype}"
max_no_signal_steps = {max_no_signal_steps}

[learner.optimizer]
learning_rate = {learning_rate}
"""
_PAYS_ALL = 'kind = "function"\npath = "headrace.bench.step_reward:reward"'
_PAYS_ANSWERS = 'kind = "numeric"'


def write_recipe(folder: Path, workload: Workload) -> Path:
    """Write prompts and recipe into ``folder``, which is made, and return the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": q, "answer": answer}) for q, answer in workload.questions]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    recipe = folder / "step.toml"
    text = _RECIPE.format(
        num_steps=workload.num_steps,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        num_threads=NUM_THREADS,
        # A JSON string is a TOML string.
        model=json.dumps(str(workload.model)),
        template="chat" if workload.is_chat else "raw",
        max_tokens=workload.max_tokens,
        dtype=workload.dtype,
        verifier=_PAYS_ANSWERS if workload.pays_answers else _PAYS_ALL,
        # Steps in which every group fell are what is measured here, and no reason to stop.
        max_no_signal_steps=1 + workload.num_steps,
        learning_rate=LEARNING_RATE,
    )
    recipe.write_text(text, encoding="utf-8")
    return recipe
