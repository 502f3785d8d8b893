"""A learner of a model that only transformers computes, against that model row by row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from foreign_lab import CONFIGS, VOCABULARY, alone
from objective_lab import difference, outcome
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.learners import TorchLearner
from headrace.learners.loss import read_tokens, token_logprobs
from headrace.learners.metrics import LossSums
from headrace.learners.packing import Microbatch
from headrace.learners.value_head import ValueHead
from headrace.models.foreign import ForeignDecoder, load_foreign
from headrace.objectives.logprobs import Support
from headrace.types import RolloutGroup

MakeLearner = Callable[..., TorchLearner]
OWN = ("llama", "mistral", "qwen2", "qwen3")
RATE = {"learner__optimizer__learning_rate": 1e-2}
TEMPERATURE = 0.7


def step(learner: TorchLearner, batch: list[RolloutGroup]) -> Mapping[str, float]:
    return asyncio.run(learner.step(batch)).metrics


def state(learner: TorchLearner) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in learner._decoder.named_parameters()}
    for name, parameter in learner._decoder.named_parameters():
        for key, value in learner._optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = value.clone()
    return found


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def packed(learner: TorchLearner, batch: Sequence[RolloutGroup]) -> Microbatch:
    (found,) = learner._plan(learner._score(batch, LossSums())).batches
    return found


# --- the gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", OWN)
def test_a_family_of_the_decoders_has_the_same_gradient_through_transformers(
    family: str,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
    model_directory: Callable[[str], Path],
) -> None:
    settings = {"objective__kl_coefficient": 0.1, "objective__entropy_coefficient": 0.01}
    expected, expected_metrics = outcome(make_learner(family, **settings), batch)
    foreign = load_foreign(model_directory(family))
    found, metrics = outcome(make_learner(family, policy=foreign, **settings), batch)
    own = {name.removeprefix("model."): gradient for name, gradient in found.items()}
    assert own.keys() == expected.keys()
    assert difference(own, expected) < 1e-5
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


def literal(
    model: torch.nn.Module, batch: Microbatch, kept: Sequence[Sequence[int]] | None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [M], one unpadded row at a time, by transformers' own forward."""
    logprobs, entropies = [], []
    shared, *parts = torch.split(
        batch.input_ids, [batch.num_shared, *batch.suffix_lengths, *batch.completion_lengths]
    )
    prompts = [torch.cat((shared, part)) for part in parts[: len(batch.prompt_lengths)]]
    for row, owner in zip(batch.rows, batch.prompt_of_completion, strict=True):
        ids = [*prompts[owner].tolist(), *row.rollout.completion_ids]
        logits = model(torch.tensor([ids])).logits[0] / TEMPERATURE
        for index in row.trained:
            one = logits[len(prompts[owner]) + index - 1]
            allowed = list(range(VOCABULARY)) if kept is None else list(kept[len(logprobs)])
            chosen = allowed.index(row.rollout.completion_ids[index])
            own = torch.log_softmax(one[allowed], dim=-1)
            logprobs.append(own[chosen])
            entropies.append(-(own.exp() * own).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def drawn_support(batch: Microbatch) -> list[list[int]]:
    torch.manual_seed(3)
    return [
        sorted({int(target), *torch.randint(VOCABULARY, (7,)).tolist()})
        for target in batch.target_ids
    ]


@pytest.mark.parametrize("has_support", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_entropies_and_their_gradients_are_those_of_each_row_alone(
    *,
    family: str,
    has_support: bool,
    batch: list[RolloutGroup],
    make_learner: MakeLearner,
    model_directory: Callable[[str], Path],
) -> None:
    learner = make_learner(family)
    part, theirs = packed(learner, batch), alone(model_directory(family))
    kept = drawn_support(part) if has_support else None
    if kept is not None:
        rows = torch.tensor([row for row, ids in enumerate(kept) for _ in ids])
        ids = torch.tensor([token for own in kept for token in own])
        part = replace(part, support=Support(rows=rows, ids=ids))
    found = token_logprobs(learner._decoder, part, TEMPERATURE, entropy_gradient=True)
    expected = literal(theirs, part, kept)
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    weights = torch.randn(2, len(part.target_ids))
    (torch.stack(found) * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    own = {name: p.grad for name, p in learner._decoder.model.named_parameters()}
    whole = {name: p.grad for name, p in theirs.named_parameters()}
    assert own.keys() == whole.keys()
    reached = [name for name in whole if whole[name] is not None]
    assert len(reached) > len(whole) // 2
    assert difference({n: own[n] for n in reached}, {n: whole[n] for n in reached}) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_how_rows_are_divided_changes_no_gradient(
    family: str, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    budgets = [1, 40, 16384]
    found = [
        outcome(make_learner(family, learner__max_tokens_per_microbatch=budget), batch)[0]
        for budget in budgets
    ]
    assert difference(found[1], found[0]) < 1e-5
    assert difference(found[2], found[0]) < 1e-5


def test_a_value_head_reads_what_the_output_layer_reads(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner("gpt2")
    part = packed(learner, batch)
    head = ValueHead(16, torch.device("cpu"), torch.float32)
    torch.nn.init.normal_(next(head.parameters()))
    decoder = learner._decoder
    assert isinstance(decoder, ForeignDecoder)
    found = read_tokens(decoder, part, 1.0, head=head).values
    assert found is not None
    row = part.rows[0]
    prompt = part.input_ids[: part.prompt_lengths[0]].tolist()
    ids = torch.tensor([[*prompt, *row.rollout.completion_ids]])
    columns = torch.tensor([len(prompt) + index - 1 for index in row.trained])
    hidden = decoder.hidden(ids, torch.zeros_like(columns), columns)
    assert part.prompt_of_completion[0] == 0
    torch.testing.assert_close(found[: len(columns)], head(hidden))


# --- steps and checkpoints --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi"])
def test_two_steps_a_new_learner_and_two_more_are_four_bit_for_bit(
    family: str, tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    settings = RATE | {"objective__kl_coefficient": 0.1}
    through, first, second = (make_learner(family, **settings) for _ in range(3))
    figures = [step(through, batch) for _ in range(4)]
    assert figures[0]["learner/kl/reference"] == 0.0
    assert figures[1]["learner/kl/reference"] > 0.0
    for _ in range(2):
        step(first, batch)
    (tmp_path / "c").mkdir()
    asyncio.run(first.save(tmp_path / "c"))
    assert asyncio.run(second.load(tmp_path / "c")) == 2
    for _ in range(2):
        step(second, batch)
    assert same(state(through), state(second))


def test_a_checkpoint_of_another_family_is_refused_and_replaces_nothing(
    tmp_path: Path, batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    other, learner = make_learner("olmo2"), make_learner("gpt2")
    step(other, batch)
    asyncio.run(other.save(tmp_path))
    before = state(learner)
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        asyncio.run(learner.load(tmp_path))
    assert same(state(learner), before)


def test_a_step_in_bfloat16_moves_the_masters(
    batch: list[RolloutGroup], make_learner: MakeLearner
) -> None:
    learner = make_learner("gpt2", **RATE, compute_dtype=torch.bfloat16)
    before = state(learner)
    assert step(learner, batch)["learner/gradient/norm"] > 0.0
    after = state(learner)
    assert all(not torch.equal(before[name], after[name]) for name in before)
