from __future__ import annotations

import asyncio
import math
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_lab import CONFIGS as FOREIGN
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.compute import ComputeThread
from headrace.config import RunConfig, parse_config
from headrace.learners import PolicySource, TorchLearner
from headrace.learners.adapter import begin_adapter
from headrace.learners.selection import TrainingGroup, TrainingRow
from headrace.models.attention import alike_runs
from headrace.models.decoder import Decoder
from headrace.models.foreign import Policy, load_policy
from headrace.models.hf_files import read_hf_config
from headrace.roles import WeightRoom
from headrace.types import (
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
)

VOCABULARY = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
}


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family, the decoder's or another -> a directory with random weights, biases and all."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            torch.manual_seed(0)
            config = FAMILIES[family] if family in FAMILIES else FOREIGN[family]()
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.3 * torch.randn_like(parameter))
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """Dotted settings with ``__`` for the dot -> a recipe; the rest is the smallest that parses."""

    def make(**settings: object) -> RunConfig:
        tree: dict[str, Any] = {
            "num_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": {"type": "jsonl", "path": "unused"}},
            "verifier": {"components": {"answer": {"kind": "exact"}}},
            "sampling": {"max_tokens": 16},
        }
        for key, value in settings.items():
            *sections, last = key.split("__")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = value
        return parse_config(tree)

    return make


@pytest.fixture
def make_learner(
    model_directory: Callable[[str], Path], make_config: Callable[..., RunConfig]
) -> Iterator[Callable[..., TorchLearner]]:
    """Family and settings -> a learner, closed at the end of the test."""
    made: list[TorchLearner] = []
    shared = ComputeThread("learner", torch.get_num_threads())

    def make(
        family: str = "llama",
        *,
        compute: ComputeThread = shared,
        num_updates: int = 10,
        compute_dtype: torch.dtype = torch.float32,
        export_dtype: torch.dtype = torch.float32,
        policy: Policy | None = None,
        room: WeightRoom | None = None,
        **settings: object,
    ) -> TorchLearner:
        directory, config = model_directory(family), make_config(**settings)
        decoder = policy or load_policy(directory)
        if config.learner.lora is not None:
            assert isinstance(decoder, Decoder)
            begin_adapter(decoder, config.learner.lora, seed=config.seed)
        learner = TorchLearner(
            decoder,
            PolicySource(directory=directory, hf_config=read_hf_config(directory)),
            config,
            num_updates=num_updates,
            compute=compute,
            compute_dtype=compute_dtype,
            export_dtype=export_dtype,
            room=room,
        )
        made.append(learner)
        return learner

    yield make
    for learner in made:
        asyncio.run(learner.close())
    shared.close()


@pytest.fixture
def make_group() -> Callable[..., RolloutGroup]:
    """Prompt, completions, rewards (None: not scored) -> a scored group.

    Log-probs are drawn about those of a flat policy where they are not given.
    """

    def make(
        prompt: Sequence[int],
        completions: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        *,
        masks: Sequence[Sequence[bool]] | None = None,
        logprobs: Sequence[Sequence[float]] | None = None,
        group_id: str = "0/a",
    ) -> RolloutGroup:
        draw = random.Random(f"{prompt}{completions}")  # noqa: S311 - test data
        rollouts = tuple(
            Rollout(
                rollout_index=index,
                completion_ids=tuple(ids),
                loss_mask=tuple(masks[index]) if masks else (True,) * len(ids),
                generator_logprobs=tuple(
                    logprobs[index]
                    if logprobs
                    else (-math.log(VOCABULARY) + draw.gauss(0.0, 1.0) for _ in ids)
                ),
                version_spans=(
                    (VersionSpan(policy_version=0, start=0, end=len(ids)),) if ids else ()
                ),
                finish_reason="stop",
                text="",
            )
            for index, ids in enumerate(completions)
        )
        return RolloutGroup(
            group_id=group_id,
            prompt=Prompt(prompt_id=group_id, source="s", text="", token_ids=tuple(prompt)),
            rollouts=rollouts,
            sampling=SamplingParams(),
            verdicts=tuple(_verdict(reward) for reward in rewards),
        )

    return make


def _verdict(reward: float | None) -> Verdict:
    outcome = Outcome.INFRA if reward is None else Outcome.PASS
    return Verdict(outcome=outcome, reward=reward, verifier="answer")


@pytest.fixture
def batch(make_group: Callable[..., RolloutGroup]) -> list[RolloutGroup]:
    """Uneven groups: holes in a mask, single tokens, unscored rollouts, no spread, one scored."""
    draw = random.Random(0)  # noqa: S311 - test data

    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    holes = [True, False, False, True, True, False, True, True, False]
    return [
        make_group(
            ids(5),
            [ids(1), ids(6), ids(3), ids(9)],
            [1.0, 0.0, 0.25, 0.5],
            masks=[[True], [True] * 6, [False, True, True], holes],
            group_id="0/holes",
        ),
        make_group(ids(1), [ids(4), ids(7), ids(2)], [0.0, None, 1.0], group_id="0/unscored"),
        make_group(ids(7), [ids(3), ids(5)], [0.1, 0.1], group_id="0/no-spread"),
        make_group(ids(3), [ids(2), ids(2), []], [1.0, None, 0.0], group_id="0/one-scored"),
        make_group(ids(6), [ids(8), ids(1)], [-1.0, 2.0], group_id="0/pair"),
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MB; skips where mounting is not permitted."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if mount is None or umount is None:
        pytest.skip("no mount command")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield disk
    subprocess.run([umount, str(disk)], check=True)


PackedOrder = Callable[[Sequence[TrainingGroup]], list[tuple[TrainingGroup, TrainingRow]]]


@pytest.fixture
def packed_order() -> PackedOrder:
    """Give group and row of every completion, in the order of a micro-batch of the groups."""

    def order(groups: Sequence[TrainingGroup]) -> list[tuple[TrainingGroup, TrainingRow]]:
        by_prompt = sorted(groups, key=lambda group: len(group.prompt_ids), reverse=True)
        found: list[tuple[TrainingGroup, TrainingRow]] = []
        for run in alike_runs([len(group.prompt_ids) for group in by_prompt]):
            rows = [(group, row) for group in by_prompt[run] for row in group.rows]
            found += sorted(rows, key=lambda pair: pair[1].num_inputs, reverse=True)
        return found

    return order
