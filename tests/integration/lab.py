"""A tiny model, a task that pays for one letter, and the command itself as a process or a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig

CHARACTERS = "0123456789+-=:"
IDS = {"<pad>": 0, "$": 1} | {character: 2 + n for n, character in enumerate(CHARACTERS)}
PATIENCE_SECONDS = 240.0

REWARD = '''
def share_of_ones(prompt, completion, answer, metadata):
    """Pay the share of the completion that is the digit 1."""
    return completion.count("1") / max(len(completion), 1)
'''

RECIPE = """
name = "tiny"
seed = 1
num_steps = 8
groups_per_step = 4
group_size = 4
num_threads = 1

[model]
path = "{model}"

[data]
template = "raw"
max_prompt_tokens = 12

[data.train]
type = "jsonl"
path = "train.jsonl"

[data.eval]
type = "jsonl"
path = "heldout.jsonl"

[sampling]
max_tokens = 8

[verifier]
pass_threshold = 0.5

[verifier.components.ones]
kind = "function"
path = "reward.py:share_of_ones"
num_processes = 1

[objective]
advantage = "dr_grpo"

[learner.optimizer]
learning_rate = 3e-2

[eval]
every = 4
num_rollouts = 2
pass_at_k = [1, 2]

[checkpoint]
every = 2
keep = 2
"""


def write_model(directory: Path, *, seed: int = 0, **changes: object) -> Path:
    """Write a random Llama of two layers with a tokenizer of one token per character."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(IDS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "torch_dtype": "float32",
    } | changes
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if config["model_type"] == "llama":
        torch.manual_seed(seed)
        decoder = Decoder(DecoderConfig.from_hf(config, origin="test"))
        weights = {name: 0.2 * torch.randn_like(p) for name, p in decoder.named_parameters()}
        weights |= {name: torch.ones_like(p) for name, p in weights.items() if "norm" in name}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "$"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "$",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_rows(path: Path, first: int, count: int) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


@dataclass
class Running:
    """A command that is running."""

    process: subprocess.Popen[str]

    def wait(self) -> Ended:
        out, err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return Ended(self.process.returncode, out, err)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Watch closely; False when the command ended before the condition held."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            if condition():
                return True
            assert time.monotonic() < deadline, "the command hangs"
            time.sleep(0.001)
        return False


@dataclass(frozen=True)
class Lab:
    """One folder with a recipe and everything it names."""

    folder: Path

    @property
    def recipe(self) -> Path:
        return self.folder / "tiny.toml"

    def start(
        self, *arguments: object, limit: int | None = None, cwd: Path | None = None
    ) -> Running:
        """Start ``headrace`` with one thread; ``limit`` is the largest file in KiB."""
        command = [sys.executable, "-m", "headrace", *map(str, arguments)]
        if limit is not None:
            command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
        return Running(
            subprocess.Popen(
                command,
                cwd=cwd or self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def train(self, output: str, *arguments: object, **options: Any) -> Running:  # noqa: ANN401 - those of start
        return self.start(
            "train", self.recipe, "--output", self.folder / output, *arguments, **options
        )


def make_lab(folder: Path) -> Lab:
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", 0, 14)
    write_rows(folder / "heldout.jsonl", 20, 3)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    lab = Lab(folder)
    lab.recipe.write_text(RECIPE.format(model=folder / "model"), encoding="utf-8")
    return lab


def is_timeless(metric: str) -> bool:
    """Whether neither a clock nor the machine's free memory decides a metric."""
    of_clocks = ("second", "/idle/", "/slots/", "cache/max_held_share")
    return not any(part in metric for part in of_clocks)


Command = Callable[..., Ended]
