"""What is refused of a learner of several ranks, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab import Lab

from headrace.config import check_config
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig
from headrace.models.hf_files import read_hf_config
from headrace.runtime.preflight import preflight
from headrace.runtime.rank_problems import rank_problems

FOREIGN = ForeignConfig(
    directory=Path("gpt2"), family="gpt2", vocab_size=10, max_positions=10, num_parameters=10
)


def decoder_config(lab: Lab) -> DecoderConfig:
    return DecoderConfig.from_hf(read_hf_config(lab.folder / "model"), origin="test")


def problems(lab: Lab, *settings: str, model: DecoderConfig | ForeignConfig) -> list[str]:
    return list(rank_problems(check_config(lab.recipe, settings), model))


def test_one_rank_is_refused_nothing(lab: Lab) -> None:
    assert problems(lab, model=FOREIGN) == []
    assert problems(lab, "learner.parallel.shards=1", model=decoder_config(lab)) == []


def test_a_model_that_transformers_computes_is_refused(lab: Lab) -> None:
    (line,) = problems(lab, "learner.parallel.replicas=2", model=FOREIGN)
    assert line.startswith("learner.parallel of 2 ranks: a model of family gpt2")
    assert "remove learner.parallel" in line


def test_heads_that_tensor_ranks_cannot_share_are_refused_with_what_they_can(lab: Lab) -> None:
    (line,) = problems(lab, "learner.parallel.tensor=4", model=decoder_config(lab))
    assert "learner.parallel.tensor = 4: it must divide the model's 2 attention heads" in line
    assert line.endswith("use 1 or 2")
    assert problems(lab, "learner.parallel.tensor=2", model=decoder_config(lab)) == []


def test_any_number_of_shards_and_replicas_is_served(lab: Lab) -> None:
    settings = ("learner.parallel.shards=7", "learner.parallel.replicas=3")
    assert problems(lab, *settings, model=decoder_config(lab)) == []


def test_more_ranks_than_cuda_devices_are_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (line,) = problems(lab, "learner.parallel.shards=2", model=decoder_config(lab))
    assert "each needs a CUDA device of its own and there are 1" in line


def test_the_preflight_says_so_beside_every_other_fault(lab: Lab) -> None:
    settings = ("learner.parallel.tensor=3", "sampling.stop_token_ids=[99999]")
    found = preflight(check_config(lab.recipe, settings)).problems
    assert any("learner.parallel.tensor = 3" in line for line in found)
    assert any("stop_token_ids" in line for line in found)


def test_an_adapter_with_ranks_is_refused(lab: Lab) -> None:
    settings = ("learner.lora.rank=4", "learner.parallel.shards=2")
    found = check_config(lab.recipe, settings).problems
    assert len(found) == 1
    assert found[0].startswith("learner.lora with learner.parallel of 2 ranks: an adapter is")
    assert found[0].endswith("remove learner.parallel, or train all weights")
