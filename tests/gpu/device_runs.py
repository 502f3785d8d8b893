"""Rollouts sampled and policies updated on any device, to be compared with the processor's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from cuda_lab import CudaLab, run_out, slow_paged_decode
from lab import write_model
from pretended_device import pretended_device

from headrace.compute import ComputeThread
from headrace.config import parse_config
from headrace.generators.torch_engine.sampling import uniforms
from headrace.learners import PolicySource, TorchLearner
from headrace.learners.state import load_state, save_state
from headrace.models.checkpoint import load_decoder
from headrace.models.hf_files import read_hf_config
from headrace.types import (
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
)

T = TypeVar("T")

RECIPE: dict[str, Any] = {
    "num_steps": 1,
    "groups_per_step": 2,
    "model": {"path": "unused"},
    "data": {"train": {"type": "jsonl", "path": "unused"}},
    "verifier": {"components": {"answer": {"kind": "exact"}}},
    "sampling": {"max_tokens": 16},
}
COMPLETIONS = (((4, 5, 6), (7, 8), (9,), (4, 4, 4, 4)), ((4, 5), (7, 8, 9, 3, 2)))


def sampled(
    device: str, sampling: Mapping[str, Any], *, by_table: bool = False
) -> list[RolloutGroup]:
    """What an engine on ``device`` samples; ``by_table``: decoding as with the kernel."""
    lab = CudaLab(device)
    requests = lab.requests(**{"max_tokens": 20, **sampling})
    if by_table:
        return run_out(lab.engine(lab.decoder(), slow_paged_decode, None), requests)
    return run_out(lab.plain_engine(lab.decoder(), device), requests)


def learned(device: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Two steps, the second from a checkpoint of the first: metrics, and a sum over each weight."""
    with TemporaryDirectory() as place:
        model, saved = write_model(Path(place) / "model"), Path(place) / "saved"
        saved.mkdir()
        first = _learner(model, device, settings)
        first._step(_groups())
        _save(first, saved)
        second = _learner(model, device, settings)
        _restore(second, saved)
        metrics = dict(second._step(_groups()).metrics)
        published = second._export().tensors
    sums = {name: float(weight.double().square().sum()) for name, weight in published.items()}
    return metrics | sums


def on_pretended_device(run: Callable[..., T], *args: object, **options: object) -> T:
    """Return what ``run`` returns, with the pretended device in front."""
    with pretended_device() as device:
        return run(str(device), *args, **options)


def mixed_devices() -> str:
    """Say what comes of adding tensors of two devices, and of looking into one."""
    said = []
    with pretended_device() as device:
        there, here = torch.ones(3, device=device), torch.ones(3)
        for fault in (lambda: there + here, lambda: torch.cat((here, there)), there.numpy):
            try:
                fault()
            except (AssertionError, RuntimeError) as error:
                said.append(type(error).__name__)
        float((there + 1.0).sum())
        uniforms(here.long(), here.long(), device)
    return " ".join(said)


def _learner(model: Path, device: str, settings: Mapping[str, Any]) -> TorchLearner:
    return TorchLearner(
        load_decoder(model, device=device),
        PolicySource(directory=model, hf_config=read_hf_config(model)),
        parse_config({**RECIPE, **settings}),
        num_updates=4,
        compute=ComputeThread("learner", 1),
    )


def _save(learner: TorchLearner, directory: Path) -> None:
    save_state(
        directory,
        learner._decoder,
        learner._optimizer,
        learner._counters,
        hf_config=learner._source.hf_config,
        source_directory=learner._source.directory,
    )


def _restore(learner: TorchLearner, directory: Path) -> None:
    learner._counters = load_state(directory, learner._decoder, learner._optimizer)


def _groups() -> list[RolloutGroup]:
    return [_group(str(n), (2,) * (3 + n), ids) for n, ids in enumerate(COMPLETIONS)]


def _group(
    name: str, prompt: tuple[int, ...], completions: tuple[tuple[int, ...], ...]
) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            rollout_index=index,
            completion_ids=ids,
            loss_mask=(True,) * len(ids),
            generator_logprobs=(-2.0 - 0.1 * index,) * len(ids),
            version_spans=(VersionSpan(policy_version=0, start=0, end=len(ids)),),
            finish_reason="stop",
            text="",
        )
        for index, ids in enumerate(completions)
    )
    verdicts = tuple(
        Verdict(outcome=Outcome.PASS, reward=float(n % 2), verifier="fake")
        for n in range(len(rollouts))
    )
    return RolloutGroup(
        group_id=name,
        prompt=Prompt(prompt_id=name, source="test", text="", token_ids=prompt),
        rollouts=rollouts,
        sampling=SamplingParams(),
        verdicts=verdicts,
    )
