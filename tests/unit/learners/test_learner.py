"""What a step does, counts, refuses and stops for."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.compute import ComputeThread
from headrace.config import ObjectiveConfig
from headrace.errors import DivergedError, LearnerHungError, NoSignalError, RunError
from headrace.learners import TorchLearner
from headrace.learners.loss import LossSetting, microbatch_loss, token_logprobs
from headrace.learners.metrics import LossSums
from headrace.learners.minibatch import Minibatch
from headrace.learners.packing import microbatches
from headrace.learners.selection import score, select, trained_rewards
from headrace.models.decoder import Decoder
from headrace.models.decoder_config import DecoderConfig
from headrace.models.weights import checksum
from headrace.types import RolloutGroup, StepResult

if TYPE_CHECKING:
    from tests.unit.learners.conftest import PackedOrder


def truncated(bound: float) -> dict[str, object]:
    return {"weight": {"level": "token", "mode": "truncate", "high": bound}}


def planned(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> Minibatch:
    return learner._plan(learner._score(groups, LossSums()))


def step(learner: TorchLearner, groups: Sequence[RolloutGroup]) -> StepResult:
    return asyncio.run(learner.step(groups))


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner._decoder.state_dict().items()}


def moments(learner: TorchLearner) -> list[Tensor]:
    states = learner._optimizer.state.values()
    return [value.clone() for state in states for value in state.values()]


def are_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def pair(make_group: Callable[..., RolloutGroup]) -> RolloutGroup:
    return make_group([1, 2, 3], [[4, 5, 6], [7, 8]], [1.0, 0.0])


@pytest.fixture
def flat(make_group: Callable[..., RolloutGroup]) -> RolloutGroup:
    return make_group([1, 2, 3], [[4, 5], [6]], [0.5, 0.5])


@pytest.fixture
def poisoned(make_group: Callable[..., RolloutGroup]) -> RolloutGroup:
    """One trained token whose log-prob is not a number."""
    return make_group([1], [[4, 5], [6]], [1.0, 0.0], logprobs=[[-1.0, math.nan], [-1.0]])


# --- one update -------------------------------------------------------------------------------


def test_a_step_is_one_clipped_adamw_update_of_the_accumulated_gradient(
    batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    settings = {"learner__optimizer__learning_rate": 0.01}
    learner = make_learner(**settings)
    learner._accumulate(planned(learner, batch))
    before = weights(learner)
    gradients = {name: p.grad for name, p in learner._decoder.named_parameters()}
    norm = math.sqrt(sum(g.double().square().sum() for g in gradients.values()))
    assert norm > 1.0, "or nothing would be clipped"
    stepped = make_learner(**settings)
    result = step(stepped, batch)
    assert (result.policy_version, result.num_updates) == (1, 1)
    assert result.metrics["learner/gradient/norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        clipped = gradient / norm
        moved = 0.01 * clipped / (clipped.abs() + 1e-8)
        found = weights(stepped)[name]
        torch.testing.assert_close(found, before[name] - moved, rtol=1e-4, atol=1e-5)


def test_gradients_do_not_outlive_their_step(
    pair: RolloutGroup, make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner()
    step(learner, [pair])
    assert all(parameter.grad is None for parameter in learner._parameters)


def test_with_recompute_every_minibatch_has_the_logprobs_from_before_the_first_update(
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
    packed_order: PackedOrder,
) -> None:
    common: dict[str, Any] = {
        "learner__num_minibatches": 2,
        "groups_per_step": 2,
        "max_staleness": 1,
        "learner__optimizer__learning_rate": 0.01,
        "sampling__temperature": 0.7,
    }
    groups = [batch[0], batch[4]]
    recomputed = make_learner(**common, objective__proximal="recompute")
    honest = make_learner(**common)
    replayed = []
    for group in groups:
        (part,) = planned(honest, [group]).batches
        with torch.no_grad():
            found = iter(honest._logprobs(honest._decoder, part).tolist())
        selection = planned(honest, [group]).selection
        of_rollout = {
            row.rollout.rollout_index: [next(found) for _ in row.trained]
            for _, row in packed_order(selection.groups)
        }
        taken = {index: iter(values) for index, values in of_rollout.items()}
        rows = [
            [next(taken[r.rollout_index]) if m else 0.0 for m in r.loss_mask]
            for r in group.rollouts
        ]
        replayed.append(
            make_group(
                group.prompt.token_ids,
                [r.completion_ids for r in group.rollouts],
                group.rewards,
                masks=[r.loss_mask for r in group.rollouts],
                logprobs=rows,
            )
        )
    result = step(recomputed, groups)
    assert result.num_updates == 2
    # The second minibatch is off its proximal policy by one update.
    assert abs(result.metrics["learner/importance_ratio/max"] - 1.0) > 1e-3
    step(honest, replayed)
    torch.testing.assert_close(weights(recomputed), weights(honest), rtol=1e-6, atol=1e-6)


def test_with_tis_every_minibatch_is_weighed_by_the_logprobs_from_before_the_first_update(
    batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    groups, bound = [batch[0], batch[4]], 1.5
    learner = make_learner(
        learner__num_minibatches=2,
        groups_per_step=2,
        max_staleness=4,
        learner__optimizer__learning_rate=0.01,
        objective__proximal="recompute",
        objective__correction=truncated(bound),
    )
    expected: list[float] = []
    for group in groups:
        (part,) = planned(learner, [group]).batches
        with torch.no_grad():
            before = learner._logprobs(learner._decoder, part)
        gaps = (before - part.generator_logprobs).tolist()
        expected += [min(math.exp(gap), bound) for gap in gaps]

    metrics = step(learner, groups).metrics

    assert abs(metrics["learner/importance_ratio/max"] - 1.0) > 1e-3, "q has left p behind"
    found = metrics["learner/importance_weight/mean"]
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_on_policy_the_ratio_and_every_weight_are_one_at_any_temperature(
    temperature: float,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
    model_directory: Callable[[str], Path],
) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy, and only used here

    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.float32)
    prompt, completions = [3, 1, 4], [[1, 5, 9, 2], [6, 5], [3]]
    logprobs = []
    for ids in completions:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, 2:-1]
        scaled = torch.log_softmax(logits / temperature, dim=-1)
        logprobs.append(scaled[torch.arange(len(ids)), torch.tensor(ids)].tolist())
    group = make_group(prompt, completions, [1.0, 0.0, 0.5], logprobs=logprobs)
    metrics = step(make_learner(sampling__temperature=temperature), [group]).metrics
    assert metrics["learner/importance_ratio/mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["learner/importance_ratio/max"] == pytest.approx(1.0, abs=5e-6)
    tis = {"objective__proximal": "recompute", "objective__correction": "tis"}
    weighed = step(make_learner(sampling__temperature=temperature, **tis), [group]).metrics
    for statistic in ("mean", "max", "ess"):
        found = weighed[f"learner/importance_weight/{statistic}"]
        assert found == pytest.approx(1.0, abs=5e-6)
    assert metrics["learner/mismatch/k3"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["learner/clip/share"] == 0.0


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_metrics_are_the_same_for_every_token_budget(
    kl: float, batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    found = []
    for budget in (1, 20, 10_000):
        learner = make_learner(
            objective__kl_coefficient=kl, learner__max_tokens_per_microbatch=budget
        )
        found.append(step(learner, batch).metrics)
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    expected = {
        "learner/groups/num_no_spread": 2.0,
        "learner/groups/num_trained": 5.0 if kl else 3.0,
    }
    assert found[0].items() >= expected.items()
    assert found[0]["learner/tokens/num_trained"] == (14 + 6 + 9) + (8 + 2 if kl else 0)
    assert ("learner/kl/reference" in found[0]) == bool(kl)


# --- faults -----------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    pair: RolloutGroup, poisoned: RolloutGroup, make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner()
    step(learner, [pair])
    before = weights(learner), moments(learner)
    result = step(learner, [pair, poisoned])
    assert (result.num_updates, result.policy_version) == (0, 1)
    assert result.metrics["learner/step/num_skipped"] == 1.0
    assert are_equal(weights(learner), before[0])
    assert all(map(torch.equal, moments(learner), before[1]))
    # The next one is none the worse for it.
    assert step(learner, [pair]).num_updates == 1


def test_several_such_steps_in_a_row_stop_the_run_with_the_last_good_weights(
    pair: RolloutGroup,
    flat: RolloutGroup,
    poisoned: RolloutGroup,
    make_learner: Callable[..., TorchLearner],
) -> None:
    learner = make_learner(learner__max_nonfinite_steps=3)
    for groups in ([poisoned], [poisoned], [pair], [poisoned], [poisoned]):
        step(learner, groups)
    # A step that tries nothing is no proof of health.
    step(learner, [flat])
    good = weights(learner)
    with pytest.raises(DivergedError, match=r"3 steps in a row .*weights are those of version 1"):
        step(learner, [poisoned])
    assert are_equal(weights(learner), good)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in good.values())


@pytest.mark.parametrize("what", ["all masked", "none scored", "no spread", "no group at all"])
def test_a_step_with_nothing_to_learn_is_counted_and_changes_nothing(
    what: str,
    flat: RolloutGroup,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
) -> None:
    groups = {
        "all masked": [make_group([1], [[2, 3], [4]], [1.0, 0.0], masks=[[False] * 2, [False]])],
        "none scored": [make_group([1], [[2, 3], [4]], [None, None])],
        "no spread": [flat],
        "no group at all": [],
    }[what]
    learner = make_learner()
    before = weights(learner)
    result = step(learner, groups)
    assert (result.num_updates, result.policy_version) == (0, 0)
    assert result.metrics["learner/step/num_no_signal"] == 1.0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert are_equal(weights(learner), before)
    assert not any(moment.any() for moment in moments(learner))


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_rewards_that_never_differ_stop_the_run_with_the_reasons(
    kl: float,
    flat: RolloutGroup,
    pair: RolloutGroup,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
) -> None:
    unscored = make_group([1], [[2, 3], [4]], [None, None])
    learner = make_learner(learner__max_no_signal_steps=3, objective__kl_coefficient=kl)
    for groups in ([flat], [flat], [pair, flat], [flat], [flat]):
        step(learner, groups)
    reasons = r"3 steps in a row .*2 groups all equal 0.5, 1 groups none scored"
    with pytest.raises(NoSignalError, match=reasons):
        step(learner, [flat, unscored, flat])


@pytest.mark.parametrize("room", [0, 1])
def test_a_rollout_longer_than_the_models_context_is_named_and_nothing_is_trained(
    room: int,
    pair: RolloutGroup,
    make_learner: Callable[..., TorchLearner],
    make_group: Callable[..., RolloutGroup],
) -> None:
    positions = 64
    completion = [1] * (positions + 1 - 5 + 1 - room)
    group = make_group([2] * 5, [[3], completion], [1.0, 0.0], group_id="0/long")
    learner = make_learner()
    if room:
        assert step(learner, [group]).num_updates == 1, "the last token needs no position"
        return
    before = weights(learner)
    with pytest.raises(RunError, match=r"group 0/long, rollout 1: 5 prompt and 61 completion"):
        step(learner, [pair, group])
    assert are_equal(weights(learner), before)


# --- schedule ---------------------------------------------------------------------------------


def test_ten_steps_of_four_minibatches_bring_the_rate_to_zero_exactly(
    pair: RolloutGroup, make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner(
        num_updates=40,
        num_steps=10,
        groups_per_step=4,
        max_staleness=3,
        learner__num_minibatches=4,
        learner__optimizer__schedule="linear",
        learner__optimizer__learning_rate=1e-3,
    )
    for number in range(1, 11):
        result = step(learner, [pair] * 4)
        assert result.policy_version == 4 * number
        rate = result.metrics["learner/optimizer/learning_rate"]
        assert rate == pytest.approx(1e-3 * (41 - 4 * number) / 40)
    before = weights(learner)
    assert step(learner, [pair]).metrics["learner/optimizer/learning_rate"] == 0.0
    assert are_equal(weights(learner), before)


def test_an_uneven_last_batch_counts_the_updates_it_really_makes(
    pair: RolloutGroup, flat: RolloutGroup, make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner(groups_per_step=4, max_staleness=3, learner__num_minibatches=4)
    assert step(learner, [pair] * 3).policy_version == 3
    assert step(learner, [pair] * 6).policy_version == 7
    # A minibatch without a spread makes no update.
    assert step(learner, [pair, flat, pair, flat]).policy_version == 9


# --- precision and memory ---------------------------------------------------------------------


def test_small_steps_move_the_masters_and_in_time_what_is_published_in_bfloat16(
    batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    learner = make_learner(
        compute_dtype=torch.bfloat16,
        export_dtype=torch.bfloat16,
        learner__optimizer__learning_rate=1e-5,
    )
    published = [dict(asyncio.run(learner.export()).tensors)]
    masters = [weights(learner)]
    for _ in range(12):
        assert step(learner, batch).num_updates == 1
        masters.append(weights(learner))
        published.append(dict(asyncio.run(learner.export()).tensors))
    assert all(share_changed(*two) > 0.9 for two in itertools.pairwise(masters))
    first, last = (share_changed(published[0], later) for later in (published[1], published[-1]))
    assert 0.0 <= first < last < 0.5
    assert all(tensor.dtype == torch.float32 for tensor in masters[-1].values())
    assert all(tensor.dtype == torch.bfloat16 for tensor in published[-1].values())


def share_changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    changed = sum(int((before[name] != after[name]).sum()) for name in before)
    return changed / sum(tensor.numel() for tensor in before.values())


def test_bfloat16_computes_nearly_the_gradient_of_float32(
    batch: list[RolloutGroup], make_learner: Callable[..., TorchLearner]
) -> None:
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        learner = make_learner(compute_dtype=dtype, objective__proximal="recompute")
        learner._accumulate(planned(learner, batch))
        parts = [parameter.grad.flatten() for parameter in learner._parameters]
        gradients.append(torch.cat(parts))
    assert gradients[1].dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99
    assert not torch.equal(*gradients)


class Room:
    """Gives out the same memory again and again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def take(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> dict[str, Tensor]:
        if not self.tensors:
            self.tensors = {name: torch.empty(*s, dtype=dtype) for name, s in shapes.items()}
        return self.tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"learner__lora__rank": 2}])
def test_a_learner_with_a_room_publishes_there_what_it_publishes_without_one(
    dtype: torch.dtype,
    settings: dict[str, object],
    batch: list[RolloutGroup],
    make_learner: Callable[..., TorchLearner],
) -> None:
    room = Room()
    learner = make_learner(export_dtype=dtype, room=room, **settings)
    alone = make_learner(export_dtype=dtype, **settings)
    for _ in range(2):
        step(learner, batch)
        step(alone, batch)
        update, expected = (asyncio.run(one.export()) for one in (learner, alone))
        assert update.tensors is room.tensors
        assert update.checksum == expected.checksum == checksum(update.tensors.items())
        assert update.policy_version == expected.policy_version
        assert not any(tensor.requires_grad for tensor in update.tensors.values())


def test_what_is_published_in_float32_is_the_weights_themselves(
    make_learner: Callable[..., TorchLearner],
) -> None:
    learner = make_learner()
    exported = asyncio.run(learner.export()).tensors
    parameters = dict(learner._decoder.named_parameters())
    assert exported.keys() == parameters.keys()
    assert all(exported[n].data_ptr() == parameters[n].data_ptr() for n in parameters)
    assert not any(tensor.requires_grad for tensor in exported.values())


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation returned, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return found


def test_the_logits_of_all_tokens_never_exist_at_once(
    make_group: Callable[..., RolloutGroup],
) -> None:
    vocabulary = 20_000
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    hf_config = {
        **shape,
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 8,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig.from_hf(hf_config))
    group = make_group([1] * 4, [[2] * 200] * 4, [1.0, 0.0, 0.5, 0.2])
    chosen = select(
        score([group], trained_rewards([group]), estimator="grpo"),
        aggregation="token",
        max_tokens=200,
        keep_no_spread=False,
    )
    (part,) = microbatches(chosen.groups, max_tokens=10_000, device=torch.device("cpu"))
    with LargestTensor() as largest:
        logprobs, entropy = token_logprobs(decoder, part, 1.0)
        setting = LossSetting(objective=ObjectiveConfig(), max_tokens=200, policy_version=0)
        loss, _ = microbatch_loss(part, logprobs, entropy, setting, None)
        loss.backward()
    assert decoder.output_weight.grad is not None
    assert largest.numel >= vocabulary * 8, "or nothing was seen"
    assert largest.numel < 800 * vocabulary / 4


def test_closing_twice_is_no_fault(make_learner: Callable[..., TorchLearner]) -> None:
    learner = make_learner()
    asyncio.run(learner.close())
    asyncio.run(learner.close())


@pytest.mark.parametrize("what", ["step", "export", "save"])
def test_what_hangs_on_the_learners_thread_is_an_error_at_its_deadline_and_asked_no_more(
    make_learner: Callable[..., TorchLearner],
    pair: RolloutGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    compute = ComputeThread("hangs", 1)
    learner = make_learner(compute=compute, faults__learner_deadline_seconds=0.05)
    hold = threading.Event()
    monkeypatch.setattr(learner, f"_{what}", lambda *_: hold.wait())
    asked = {
        "step": lambda: learner.step([pair]),
        "export": learner.export,
        "save": lambda: learner.save(tmp_path),
    }

    with pytest.raises(LearnerHungError, match=r"learner_deadline_seconds = 0\.05.* --resume"):
        asyncio.run(asked[what]())
    for other in asked.values():
        with pytest.raises(LearnerHungError, match="has not ended"):
            asyncio.run(other())
    compute.close()  # returns, although the thread still hangs
    assert not hold.is_set()
    hold.set()
