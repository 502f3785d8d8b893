"""Several ranks take the step that one process takes, whatever is cut and however rollouts fall."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ranks_lab
import torch
from ranks_lab import Case, Gradient, Ranks, alone, trained_alone, whole
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.config import RunConfig
from headrace.errors import CheckpointError
from headrace.learners.metrics import LossSums
from headrace.learners.parallel import checkpoint
from headrace.learners.parallel.pieces import whole_pieces
from headrace.learners.state import save_state
from headrace.models.decoder import Decoder
from headrace.models.hf_files import read_hf_config
from headrace.types import RolloutGroup, StepResult

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, int]] = {
    "2 shards": {"shards": 2},
    "2 tensor": {"tensor": 2},
    "2 replicas": {"replicas": 2},
    "2 replicas of 2 shards": {"replicas": 2, "shards": 2},
    "2 shards of 2 tensor": {"shards": 2, "tensor": 2},
    "2 replicas of 2 tensor": {"replicas": 2, "tensor": 2},
}
RATE = {"learner__optimizer__learning_rate": 1e-4}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


MakeCase = Callable[..., Case]


@pytest.fixture
def make_case(
    model_directory: Callable[[str], Path], make_config: Callable[..., RunConfig]
) -> MakeCase:
    def make(
        batches: Sequence[Sequence[RolloutGroup]],
        family: str = "llama",
        dtype: torch.dtype = torch.float64,
        **settings: object,
    ) -> Case:
        config = make_config(**RATE | settings)
        return Case(model=model_directory(family), config=config, batches=batches, dtype=dtype)

    return make


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Relative to the largest number of each tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in expected.items()
    )


def weights_of(answers: Sequence[ranks_lab.Trained]) -> dict[str, Tensor]:
    return whole([answer.weights for answer in answers])


def assert_alike(found: Sequence[StepResult], expected: Sequence[StepResult], bound: float) -> None:
    for own, other in zip(found, expected, strict=True):
        assert (own.policy_version, own.num_updates) == (other.policy_version, other.num_updates)
        assert own.metrics.keys() == other.metrics.keys()
        for name, value in other.metrics.items():
            assert own.metrics[name] == pytest.approx(value, rel=bound, abs=bound), name


FAMILIES = {
    # Norms of heads and a tied embedding; biases and an output layer of its own; neither.
    **{layout: ["qwen3"] for layout in LAYOUTS},
    "2 shards of 2 tensor": ["qwen3", "qwen2"],
    "2 tensor": ["qwen3", "llama"],
}


@pytest.mark.parametrize(
    ("layout", "family"), [(layout, family) for layout in LAYOUTS for family in FAMILIES[layout]]
)
def test_gradient_and_norm_are_those_of_one_process(
    layout: str, family: str, batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    settings = {"learner__max_tokens_per_microbatch": 25, "objective__advantage": "gae"}
    case = make_case([batch], family, **settings)
    one = alone(case)
    one._accumulate(one._plan(one._score(batch, LossSums())))
    named = one._layout.parameters(one._decoder, one._head)
    answers: list[Gradient] = ranks(ranks_lab.gradient, case, parallel=LAYOUTS[layout])
    found = whole([answer.pieces for answer in answers])
    assert largest_difference(found, {name: p.grad for name, p in named.items()}) < 1e-10
    norms = [answer.norm for answer in answers]
    assert norms == pytest.approx([one._layout.gradient_norm()] * len(norms), rel=1e-12)


@pytest.mark.parametrize("layout", ["2 shards", "2 tensor", "2 replicas of 2 shards"])
def test_two_steps_in_single_precision_end_where_one_process_ends(
    layout: str, batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    case = make_case([batch, batch[::-1]], "qwen3", torch.float32)
    expected, results = trained_alone(case)
    answers = ranks(ranks_lab.train, case, parallel=LAYOUTS[layout])
    assert largest_difference(weights_of(answers), expected) < 1e-5
    for answer in answers:
        assert_alike(answer.results, results, 1e-4)
    assert all(answer.results == answers[0].results for answer in answers)


OBJECTIVES: dict[str, dict[str, object]] = {
    "minibatches, recomputed, rejecting": {
        "objective__proximal": "recompute",
        "objective__correction": {
            "rejection": {"divergence": "k3", "reduction": "mean", "high": 0.3}
        },
        "learner__num_minibatches": 2,
        "groups_per_step": 5,
        "max_staleness": 1,
    },
    "m2po": {"objective__correction": {"m2po": 0.2}, "objective__proximal": "recompute"},
    "kl in the loss": {"objective__kl_coefficient": 0.3},
    "kl in the reward": {
        "objective__kl_coefficient": 0.3,
        "objective__kl_estimator": "k1_reward",
    },
    "critic": {
        "objective__advantage": "gae",
        "objective__kl_coefficient": 0.1,
        "objective__kl_estimator": "k1_reward",
    },
    "critic, minibatches": {
        "objective__advantage": "gae",
        "learner__num_minibatches": 2,
        "groups_per_step": 5,
        "max_staleness": 1,
    },
    "by rollouts": {"objective__loss": "gspo", "objective__aggregation": "sequence"},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_kind_of_pass_is_made_by_all_ranks_together(
    objective: str, batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    layout = "2 shards of 2 tensor" if "minibatches" in objective else "2 shards"
    settings = OBJECTIVES[objective]
    case = make_case([batch, batch], **settings, learner__max_tokens_per_microbatch=20)
    expected, results = trained_alone(case)
    answers = ranks(ranks_lab.train, case, parallel=LAYOUTS[layout])
    assert largest_difference(weights_of(answers), expected) < 1e-9
    for answer in answers:
        assert_alike(answer.results, results, 1e-6)


@pytest.mark.parametrize("layout", ["2 replicas of 2 shards"])
def test_ranks_without_a_rollout_wait_for_the_others(
    layout: str, make_group: Callable[..., RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    pair = make_group([1, 2, 3], [[4, 5, 6], [7]], [1.0, 0.0])
    one_left = make_group([1, 2, 3], [[4, 5, 6], []], [1.0, 0.0])
    case = make_case([[pair], [one_left, pair]])
    expected, results = trained_alone(case)
    answers = ranks(ranks_lab.train, case, parallel=LAYOUTS[layout])
    assert largest_difference(weights_of(answers), expected) < 1e-10
    for answer in answers:
        assert_alike(answer.results, results, 1e-6)


@pytest.mark.parametrize("layout", ["2 shards of 2 tensor"])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    layout: str,
    batch: list[RolloutGroup],
    make_group: Callable[..., RolloutGroup],
    ranks: Ranks,
    make_case: MakeCase,
) -> None:
    poisoned = make_group([1], [[4, 5], [6]], [1.0, 0.0], logprobs=[[-1.0, math.nan], [-1.0]])
    case = make_case([[poisoned, *batch]])
    answers = ranks(ranks_lab.train, case, parallel=LAYOUTS[layout])
    start = {n: p.detach() for n, p in alone(case)._decoder.named_parameters()}
    found = weights_of(answers)
    assert all(torch.equal(found[name], tensor) for name, tensor in start.items())
    for answer in answers:
        (result,) = answer.results
        assert (result.policy_version, result.num_updates) == (0, 0)
        assert result.metrics["learner/step/num_skipped"] == 1.0


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_products_of_fewer_bits_are_those_of_one_process(
    compute: torch.dtype, batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    case = replace(make_case([batch], dtype=torch.float32), compute=compute)
    one = alone(case)
    one._accumulate(one._plan(one._score(batch, LossSums())))
    expected = {name: p.grad for name, p in one._decoder.named_parameters()}
    answers = ranks(ranks_lab.gradient, case, parallel=LAYOUTS["2 tensor"])
    found = whole([answer.pieces for answer in answers])
    assert largest_difference(found, expected) < 8 * torch.finfo(compute).eps


def test_recomputed_layers_give_the_same_gradient(
    batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase
) -> None:
    plain = make_case([batch])
    again = make_case([batch], learner__activation_checkpointing=True)
    expected, found = (
        whole([answer.pieces for answer in ranks(ranks_lab.gradient, case, parallel=layout)])
        for case in (plain, again)
        for layout in (LAYOUTS["2 shards"],)
    )
    assert largest_difference(found, expected) < 1e-12


# --- checkpoints ------------------------------------------------------------------------------


def one_process(case: Case, directory: Path, saved_to: Path) -> dict[str, Tensor]:
    """Go on from ``directory`` in one process, and save as one process does."""
    updater = alone(case)
    named = updater._layout.parameters(updater._decoder, updater._head)
    updater._counters = checkpoint.restore(directory, whole_pieces(named), updater._optimizer)
    for batch in case.batches:
        updater._step(list(batch))
    assert isinstance(updater._decoder, Decoder)
    save_state(
        saved_to,
        updater._decoder,
        updater._optimizer,
        updater._counters,
        hf_config=read_hf_config(case.model),
        source_directory=case.model,
        head=updater._head,
    )
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_two_ranks_then_one_then_two_others_end_where_one_that_never_stopped_ends(
    advantage: str,
    batch: list[RolloutGroup],
    ranks: Ranks,
    make_case: MakeCase,
    tmp_path: Path,
) -> None:
    settings = {"objective__advantage": advantage}
    part = make_case([batch, batch], "qwen3", torch.float32, **settings)
    expected, _ = trained_alone(make_case([batch] * 6, "qwen3", torch.float32, **settings))
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    ranks(ranks_lab.save, part, first, parallel=LAYOUTS["2 shards"])
    one_process(part, first, second)
    answers = ranks(ranks_lab.resume, part, second, parallel=LAYOUTS["2 tensor"])
    assert answers[0].results[-1].policy_version == 6
    found = weights_of(answers)
    assert all((found[name] - tensor).abs().max() < 5e-7 for name, tensor in expected.items())


def test_ranks_that_go_on_from_their_own_checkpoint_do_so_bit_for_bit(
    batch: list[RolloutGroup], ranks: Ranks, make_case: MakeCase, tmp_path: Path
) -> None:
    through = make_case([batch] * 4, "qwen3", torch.float32)
    half = make_case([batch] * 2, "qwen3", torch.float32)
    layout = LAYOUTS["2 shards of 2 tensor"]
    ranks(ranks_lab.save, half, tmp_path, parallel=layout)
    expected = weights_of(ranks(ranks_lab.train, through, parallel=layout))
    found = weights_of(ranks(ranks_lab.resume, half, tmp_path, parallel=layout))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def lose_the_moments(path: Path) -> None:
    tensors, metadata = read_file(path)
    write_file(path, {n: t for n, t in tensors.items() if not n.endswith("exp_avg")}, metadata)


def add_a_stranger(path: Path) -> None:
    tensors, metadata = read_file(path)
    known = json.loads(metadata["DCP_SHARDING_INFO"])
    known["stranger"] = {"saved_offsets": [0]}
    metadata["DCP_SHARDING_INFO"] = json.dumps(known)
    write_file(path, tensors | {"stranger": torch.zeros(1)}, metadata)


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 - not a mapping


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("damage", [remove, cut, lose_the_moments, add_a_stranger])
def test_a_checkpoint_with_a_part_missing_or_damaged_is_refused_and_replaces_nothing(
    damage: Callable[[Path], None],
    saved: tuple[Case, Path],
    tmp_path: Path,
) -> None:
    case, directory = saved
    broken = shutil.copytree(directory, tmp_path / "broken")
    damage(sorted((broken / "sharded").glob("*.safetensors"))[1])
    updater = alone(case)
    named = updater._layout.parameters(updater._decoder, updater._head)
    before = {name: parameter.clone() for name, parameter in named.items()}
    with pytest.raises(CheckpointError, match=rf"checkpoint {broken} cannot be resumed from"):
        checkpoint.restore(broken, whole_pieces(named), updater._optimizer)
    assert all(torch.equal(named[name], tensor) for name, tensor in before.items())


def test_a_checkpoint_of_another_model_is_refused(
    saved: tuple[Case, Path], make_case: MakeCase
) -> None:
    updater = alone(make_case([], "qwen2", torch.float32))
    named = updater._layout.parameters(updater._decoder, updater._head)
    with pytest.raises(CheckpointError, match="does not fit this learner"):
        checkpoint.restore(saved[1], whole_pieces(named), updater._optimizer)


@pytest.fixture
def saved(
    batch: list[RolloutGroup],
    ranks: Ranks,
    make_case: MakeCase,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Case, Path]:
    """Of a step on two shards; made once, and changed by nobody."""
    case = make_case([batch], "qwen3", torch.float32)
    if "saved" not in ranks.made:
        ranks.made["saved"] = tmp_path_factory.mktemp("saved")
        ranks(ranks_lab.save, case, ranks.made["saved"], parallel=LAYOUTS["2 shards"])
    return case, ranks.made["saved"]
