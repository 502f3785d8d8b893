"""What is trained under chaos: the bundled nano model, by a verifier of which every part can die.

The reward comes from a function in worker processes; a sandbox runs every completion as a program
besides, which changes no reward. All prompts are drawn in whole epochs, so that the ledger of a run
that lost nothing holds every one of them in each.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import headrace

_NANO = Path(headrace.__file__).resolve().parent / "recipes" / "nano"

_REWARD = '''
def is_right(prompt, completion, answer, metadata):
    """Pay 1 where the text after the last colon is the answer."""
    return float(completion.rpartition(":")[2].strip() == answer)
'''

_RECIPE = """
name = "chaos"
num_epochs = {num_epochs}
groups_per_step = {groups_per_step}
group_size = {group_size}
max_staleness = {max_staleness}
num_threads = 2

[model]
path = "nano"

[data]
template = "raw"
max_prompt_tokens = 16

[data.train]
type = "jsonl"
path = "train.jsonl"

[data.eval]
type = "jsonl"
path = "heldout.jsonl"

[sampling]
max_tokens = 24

[placement]
generators = "disaggregated"
num_generators = 2
backoff_seconds = 0.1

[verifier.components.answer]
kind = "function"
path = "reward.py:is_right"
require_stop = true
num_processes = 2

[verifier.components.program]
kind = "code"
format = "tests"
extract = "whole"
weight = 0.0
decides_pass = false

[verifier.sandbox]
num_cells = 2

[learner.parallel]
shards = 2

[learner.optimizer]
learning_rate = 3e-4
betas = [0.9, 0.95]

[eval]
every = 1000
num_rollouts = 0

[checkpoint]
every = {checkpoint_every}

[monitors]
console = false

[faults]
backoff_seconds = 0.1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How much is trained."""

    num_prompts: int
    num_epochs: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    checkpoint_every: int
    num_heldout: int
    """Prompts whose greedy pass@1 is measured at the beginning and at the end."""

    @property
    def num_steps(self) -> int:
        """Steps of a run in which no group is dropped."""
        return -(-self.num_epochs * self.num_prompts // self.groups_per_step)

    def write(self, folder: Path) -> Path:
        """Write the recipe and what it names into ``folder``, which is made; return its path."""
        folder.mkdir(parents=True)
        for name, count in (("train", self.num_prompts), ("heldout", self.num_heldout)):
            rows = (_NANO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
            (folder / f"{name}.jsonl").write_text("\n".join(map(_with_a_test, rows)) + "\n")
        (folder / "reward.py").write_text(_REWARD)
        recipe = folder / "chaos.toml"
        numbers = {name: getattr(self, name) for name in self.__slots__}
        recipe.write_text(_RECIPE.format(**numbers))
        return recipe


def _with_a_test(line: str) -> str:
    """Return the row with a test that no completion passes, or fails to be run for."""
    row = json.loads(line)
    row["tests"] = [{"input": "", "output": row["answer"], "visible": False}]
    return json.dumps(row)
