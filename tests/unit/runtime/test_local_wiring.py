"""What a recipe says reaches the part it is meant for. No value here is the default."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from lab import IDS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.compute import ComputeThread
from headrace.controller import Controller
from headrace.errors import ConfigError
from headrace.generators.torch_engine import products, runner_choice
from headrace.generators.torch_engine.cpu.panels import Panels, QuantizedPanels, can_hold_int8
from headrace.generators.torch_engine.cpu.runner import FusedRunner
from headrace.generators.torch_engine.forms import Quantized, can_multiply_int8
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_generator import BLOCK_SIZE
from headrace.kernels.vectors import LANES
from headrace.learners import TorchLearner
from headrace.models.decoder_config import DecoderConfig
from headrace.runtime.devices import CPU
from headrace.runtime.generators import compute_threads
from headrace.runtime.local import LocalRun
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.preflight import PreparedRun, _needed_bytes
from headrace.types import (
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
    VersionSpan,
    derive_seed,
)
from headrace.weight_sync import MemoryRoom, MemoryWeightSync

Start = Callable[..., Controller]
Prepare = Callable[..., PreparedRun]

EOS = 1
NO_EVALUATION = "data.eval=null"
TWO_UPDATES = ("groups_per_step=2", "learner.num_minibatches=2", "max_staleness=5")


def group(name: str) -> RolloutGroup:
    """Two rollouts of three tokens, one of them better."""
    rollouts = tuple(
        Rollout(
            rollout_index=index,
            completion_ids=(3, 4 + index, 5),
            loss_mask=(True,) * 3,
            generator_logprobs=(-2.0,) * 3,
            version_spans=(VersionSpan(policy_version=0, start=0, end=3),),
            finish_reason="stop",
            text="",
        )
        for index in range(2)
    )
    verdicts = (
        Verdict(outcome=Outcome.PASS, reward=1.0, verifier="fake"),
        Verdict(outcome=Outcome.WRONG, reward=0.0, verifier="fake"),
    )
    prompt = Prompt(prompt_id=name, source="train", text="", token_ids=(2, 6))
    return RolloutGroup(
        group_id=f"0/{name}",
        prompt=prompt,
        rollouts=rollouts,
        sampling=SamplingParams(),
        verdicts=verdicts,
    )


def learner_of(controller: Controller) -> TorchLearner:
    learner = controller._parts.learner
    assert isinstance(learner, TorchLearner)
    return learner


# --- how long, how much, in which order -----------------------------------------------------------


def test_the_plan_of_a_run_is_the_one_of_its_recipe(start: Start) -> None:
    settings = ("seed=7", "num_steps=5", "groups_per_step=3", "group_size=2", "checkpoint.every=4")
    plan = start(*settings, NO_EVALUATION)._plan

    assert (plan.seed, plan.num_steps, plan.checkpoint_every) == (7, 5, 4)
    assert (plan.groups_per_step, plan.group_size) == (3, 2)
    assert (plan.start_step, plan.start_version, plan.evaluation) == (0, 0, None)


def test_a_number_of_epochs_becomes_as_many_steps_as_its_prompts_fill(start: Start) -> None:
    controller = start("num_steps=null", "num_epochs=3", NO_EVALUATION)

    assert controller._plan.num_steps == 11, "3 * 14 prompts in batches of 4, the last one short"


@pytest.mark.parametrize(
    ("bound", "minibatches", "num_batches"), [(5, 2, 3), (5, 1, 6), (3, 2, 2), (4, 3, 1)]
)
def test_the_buffer_knows_the_bound_and_the_updates_of_a_step(
    start: Start, bound: int, minibatches: int, num_batches: int
) -> None:
    controller = start(
        f"max_staleness={bound}",
        f"learner.num_minibatches={minibatches}",
        "groups_per_step=3",
        NO_EVALUATION,
    )

    assert controller._parts.buffer.num_slots == 3 * num_batches


def drawn(start: Start, *settings: str) -> list[str]:
    """Return the id of everything a run would draw."""
    ids: list[str] = []

    def look(controller: Controller) -> None:
        ids.extend(draw.group_id for draw in iter(controller._parts.stream.draw, None))

    start("num_steps=null", "num_epochs=3", NO_EVALUATION, *settings, look=look)
    return ids


def test_without_shuffle_every_epoch_is_in_the_order_of_the_file(
    start: Start, prepare: Prepare
) -> None:
    names = [prompt.prompt_id for prompt in prepare().train.prompts]

    expected = [f"{epoch}/{name}" for epoch in range(3) for name in names]
    assert drawn(start, "data.shuffle=false") == expected


def test_prompts_are_shuffled_by_the_seed_of_the_run(start: Start, prepare: Prepare) -> None:
    names = [prompt.prompt_id for prompt in prepare().train.prompts]

    def in_order(epoch: int) -> list[str]:
        return sorted(names, key=lambda name: derive_seed(7, "data", epoch, name))

    expected = [f"{epoch}/{name}" for epoch in range(3) for name in in_order(epoch)]
    assert drawn(start, "seed=7") == expected


# --- sampling -------------------------------------------------------------------------------------


def test_the_tokenizers_end_of_sequence_ends_training_rollouts(start: Start) -> None:
    sampling = start(
        "sampling.stop_token_ids=[9]",
        "sampling.temperature=0.8",
        "sampling.max_tokens=6",
        NO_EVALUATION,
    )._plan.sampling

    assert sampling.stop_token_ids == (EOS, 9)
    assert (sampling.temperature, sampling.max_tokens) == (0.8, 6)


def test_the_tokenizers_end_of_sequence_ends_evaluation_rollouts(start: Start) -> None:
    settings = (
        "eval.sampling.stop_token_ids=[8]",
        "eval.sampling.temperature=0.5",
        "eval.sampling.max_tokens=3",
        "eval.every=7",
        "eval.num_rollouts=3",
        "eval.pass_at_k=[2, 3]",
    )
    plan = start(*settings)._plan.evaluation

    assert plan is not None
    sampled = SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=(EOS, 8))
    greedy = SamplingParams(temperature=0.0, max_tokens=3, stop_token_ids=(EOS, 8))
    assert plan.modes == {"greedy": (1, greedy), "sampled": (3, sampled)}
    assert (plan.every, plan.pass_at_k, len(plan.prompts)) == (7, (2, 3), 3)


def test_a_forced_prefix_is_the_tokens_of_its_text_alone(start: Start) -> None:
    evaluation_settings = ("eval.sampling.forced_prefix='2'", "eval.sampling.max_tokens=4")
    controller = start("sampling.forced_prefix='1+1='", *evaluation_settings)
    training, evaluation = controller._plan.sampling, controller._plan.evaluation

    assert training.forced_prefix == tuple(IDS[character] for character in "1+1=")
    assert evaluation is not None
    assert {p.forced_prefix for _, p in evaluation.modes.values()} == {(IDS["2"],)}


def test_an_evaluation_without_sampling_of_its_own_takes_that_of_training(start: Start) -> None:
    plan = start("sampling.stop_token_ids=[9]", "sampling.max_tokens=6")._plan.evaluation

    assert plan is not None
    assert {params.stop_token_ids for _, params in plan.modes.values()} == {(EOS, 9)}
    assert {params.max_tokens for _, params in plan.modes.values()} == {6}


# --- learner and generator ------------------------------------------------------------------------


def test_the_learning_rate_falls_over_every_update_of_the_run(start: Start) -> None:
    controller = start(
        *TWO_UPDATES,
        "num_steps=5",
        "learner.optimizer.schedule=linear",
        "learner.optimizer.learning_rate=0.5",
        NO_EVALUATION,
    )

    result = learner_of(controller)._step([group("a"), group("b")])

    assert result.num_updates == 2
    # The second of 5 * 2 updates: nine tenths of the peak are left.
    assert result.metrics["learner/optimizer/learning_rate"] == pytest.approx(0.5 * 9 / 10)


def test_the_correction_and_its_bound_reach_the_gradient(start: Start) -> None:
    recompute = ("objective.proximal=recompute", NO_EVALUATION)
    # Far below every weight there is here, so that each token counts exactly this much.
    weight = '{level = "token", mode = "truncate", high = 0.01}'
    tis = (f"objective.correction.weight={weight}", "max_staleness=2")
    plain = learner_of(start(*recompute, output="plain"))._step([group("a")]).metrics
    weighed = learner_of(start(*recompute, *tis, output="tis"))._step([group("a")]).metrics

    assert weighed["learner/importance_weight/truncated_share"] == 1.0
    assert weighed["learner/importance_weight/mean"] == pytest.approx(0.01)
    expected = 0.01 * plain["learner/gradient/norm"]
    assert weighed["learner/gradient/norm"] == pytest.approx(expected, rel=1e-4)


class Products(TorchDispatchMode):
    """Remembers the dtypes that weights were multiplied in, forward and backward.

    Not those of attention (``bmm``): its scores are in fp32 whatever the recipe says.
    """

    NAMES = ("mm", "addmm", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func.overloadpacket.__name__ in self.NAMES:
            self.dtypes |= {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_the_learners_products_run_in_the_dtype_of_the_recipe(start: Start, name: str) -> None:
    # The generator's dtype is the other one: neither may be taken for the other.
    other = {"bfloat16": "float32", "float32": "bfloat16"}[name]
    controller = start(
        f"learner.compute_dtype={name}", f"generator.dtype={other}", *TWO_UPDATES, NO_EVALUATION
    )

    with Products() as products:
        learner_of(controller)._step([group("a")])

    assert products.dtypes == {getattr(torch, name)}


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_weights_are_exported_in_the_generators_dtype_and_held_in_it(
    start: Start, name: str
) -> None:
    # The first weights are published: such as are not of the generator's dtype would end the run.
    other = {"float32": "bfloat16"}.get(name, "float32")
    controller = start(f"generator.dtype={name}", f"learner.compute_dtype={other}", NO_EVALUATION)

    assert controller._parts.generator._engine._engine._runner._cache.dtype == getattr(torch, name)
    masters = learner_of(controller)._decoder.parameters()
    assert {parameter.dtype for parameter in masters} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "is_copied"),
    [((), False), (("max_staleness=2",), True), (("max_staleness=2", "pipeline.depth=1"), False)],
)
def test_weights_are_copied_before_they_are_read_where_the_learner_steps_meanwhile(
    start: Start, settings: tuple[str, ...], is_copied: bool
) -> None:
    controller = start(*settings, NO_EVALUATION)

    room, sync = learner_of(controller)._room, controller._parts.weight_sync
    assert isinstance(room, MemoryRoom) == is_copied
    assert isinstance(sync, MemoryWeightSync)
    assert sync._is_copied == is_copied


def test_the_memory_that_a_run_is_said_to_need_holds_the_copy_that_is_published(
    prepare: Prepare,
) -> None:
    waiting, beside = prepare(NO_EVALUATION), prepare(NO_EVALUATION, "max_staleness=2")
    decoder = waiting.model.decoder_config
    assert isinstance(decoder, DecoderConfig)
    parameters = sum(math.prod(shape) for shape in decoder.tensor_shapes().values())

    more = _needed_bytes(beside.config, decoder) - _needed_bytes(waiting.config, decoder)
    assert more == pytest.approx(4 * parameters, rel=0.02), "an estimate counts matrices alone"


def runner_of(controller: Controller) -> FusedRunner:
    runner = controller._parts.generator._engine._engine._runner
    assert isinstance(runner, FusedRunner)
    return runner


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_matrices_are_held_in_the_dtype_that_the_recipe_says(start: Start, name: str) -> None:
    runner = runner_of(start(f"generator.dtype={name}", NO_EVALUATION))

    assert type(runner._products._head.form) is Panels


def test_matrices_are_held_in_eight_bits_where_the_recipe_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, and nothing is multiplied here: so it is the same on every processor."""
    for module in (runner_choice, products):
        monkeypatch.setattr(module, "can_hold_int8", lambda *_: False)
        monkeypatch.setattr(module, "can_multiply_int8", lambda _: True)
    runner = runner_of(start("generator.dtype=int8", NO_EVALUATION))

    assert type(runner._products._head.form) is Quantized
    assert runner._cache.dtype == resolve_dtype("auto", CPU)


def test_eight_bits_are_taken_or_refused_as_this_processor_multiplies(start: Start) -> None:
    settings = ("generator.dtype=int8", NO_EVALUATION)
    if can_hold_int8(torch.float32, CPU, LANES):
        assert type(runner_of(start(*settings))._products._head.form) is QuantizedPanels
    elif can_multiply_int8(CPU):
        assert type(runner_of(start(*settings))._products._head.form) is Quantized
    else:
        with pytest.raises(ConfigError, match="not exact"):
            start(*settings)


def test_the_limits_of_the_recipe_reach_the_generator(start: Start, prepare: Prepare) -> None:
    controller = start(
        "generator.max_concurrent_rollouts=3",
        "generator.max_prefill_tokens=5",
        "generator.on_update=recompute",
        "generator.max_cache_gib=0.001",
        "generator.dtype=bfloat16",
        NO_EVALUATION,
    )

    generator = controller._parts.generator
    scheduler = generator._engine._engine._scheduler
    assert (scheduler.max_running, scheduler._max_prefill_tokens) == (3, 5)
    assert generator._engine._on_update == "recompute"
    block = block_bytes(prepare().model.decoder_config, BLOCK_SIZE, torch.bfloat16)
    assert generator._max_cached_tokens == int(0.001 * 2**30) // block * BLOCK_SIZE


def test_a_promise_of_the_same_rollouts_alone_and_among_others_is_kept_or_refused(
    start: Start, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start("generator.batch_invariant=true", NO_EVALUATION)
    assert isinstance(controller._parts.generator._engine._engine._runner, FusedRunner)
    monkeypatch.setattr(runner_choice, "can_run", lambda *_: False)
    prepare("generator.batch_invariant=false")
    with pytest.raises(ConfigError, match="batch_invariant = true"):
        prepare("generator.batch_invariant=true")


def test_eight_bits_are_refused_before_the_start_where_they_are_not_exact(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_choice, "can_hold_int8", lambda *_: False)
    monkeypatch.setattr(runner_choice, "can_multiply_int8", lambda _: True)
    prepare("generator.dtype=int8")
    monkeypatch.setattr(runner_choice, "can_multiply_int8", lambda _: False)
    with pytest.raises(ConfigError, match="not exact"):
        prepare("generator.dtype=int8")


def threads_of(controller: Controller) -> tuple[ComputeThread, ComputeThread]:
    parts = controller._parts
    return parts.generator._engine._compute, parts.learner._compute


def test_a_synchronous_run_has_both_roles_take_turns_with_all_threads(start: Start) -> None:
    generator, learner = threads_of(start("num_threads=3", NO_EVALUATION))

    assert generator is learner
    assert generator.num_threads == 3
    assert torch.get_num_threads() == 1, "everything else keeps to one core"


@pytest.mark.parametrize(("num_threads", "expected"), [(1, (1, 1)), (2, (1, 1)), (5, (3, 2))])
def test_an_asynchronous_run_divides_the_threads_between_the_roles(
    start: Start, num_threads: int, expected: tuple[int, int]
) -> None:
    generator, learner = threads_of(
        start(f"num_threads={num_threads}", "max_staleness=1", NO_EVALUATION)
    )

    assert generator is not learner
    assert (generator.num_threads, learner.num_threads) == expected


@pytest.mark.parametrize(
    ("engine", "has_gpu", "expected"),
    [("sglang", False, (3, 3)), ("vllm", True, (3, 3)), ("vllm", False, (2, 1))],
)
def test_no_thread_is_kept_for_an_engine_that_computes_elsewhere(
    prepare: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    *,
    engine: str,
    has_gpu: bool,
    expected: tuple[int, int],
) -> None:
    config = prepare("num_threads=3", "max_staleness=1", NO_EVALUATION).config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    generator = config.generator.model_copy(update={"engine": engine})

    async def threads() -> tuple[int, int]:
        async with AsyncExitStack() as stack:
            both = compute_threads(stack, config.model_copy(update={"generator": generator}))
            return both[0].num_threads, both[1].num_threads

    assert asyncio.run(threads()) == expected


# --- resuming -------------------------------------------------------------------------------------


def steps_on_record(output: Path) -> list[tuple[str, int]]:
    text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    return [(line["kind"], line["step"]) for line in map(json.loads, text.splitlines())]


def settled_steps(output: Path) -> set[int]:
    ledger = sqlite3.connect(output / "ledger.sqlite")
    rows = ledger.execute("SELECT DISTINCT step FROM settled").fetchall()
    ledger.close()
    return {step for (step,) in rows}


def pretend_that_step_3_was_made(output: Path) -> None:
    """Leave what a run leaves that is killed after its third step, the second one kept."""
    ledger = sqlite3.connect(output / "ledger.sqlite")
    with ledger:
        ledger.execute("INSERT INTO settled VALUES (9, 'gone', 3, NULL)")
    ledger.close()
    for name, line in {
        "metrics.jsonl": {"kind": "step", "step": 3, "time": 0.0, "metrics": {}},
        "events.jsonl": {"kind": "gone", "step": 3, "time": 0.0, "message": ""},
    }.items():
        with (output / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    (output / "rollouts").mkdir(exist_ok=True)
    (output / "rollouts/step-000003.parquet").write_bytes(b"")


# The KL term moves the weights whatever the rewards are: every planned update is made.
TRAINED = (*TWO_UPDATES, "objective.kl_coefficient=0.1", "checkpoint.every=2")


@pytest.fixture
def trained(prepare: Prepare, tmp_path: Path) -> Path:
    """A run of two steps of two updates, with its checkpoint."""
    run = LocalRun(prepared=prepare(*TRAINED, "num_steps=2"), output=tmp_path / "trained")
    assert asyncio.run(run.train()).policy_version == 4
    return run.output


def test_a_resumed_run_forgets_all_that_followed_its_checkpoint_and_nothing_else(
    start: Start, trained: Path
) -> None:
    pretend_that_step_3_was_made(trained)
    before = [line for line in steps_on_record(trained) if line != ("step", 3)]

    def look(controller: Controller) -> None:
        assert settled_steps(trained) == {1, 2}
        assert controller._parts.ledger.settled(9) == frozenset()
        assert steps_on_record(trained) == before
        assert '"gone"' not in (trained / "events.jsonl").read_text(encoding="utf-8")
        assert not (trained / "rollouts/step-000003.parquet").exists()

    controller = start(
        *TRAINED,
        "num_steps=4",
        look=look,
        output=str(trained.relative_to(trained.parent)),
        resume=True,
    )

    assert controller._plan.start_step == 2
    assert controller._plan.start_version == learner_of(controller).policy_version == 4


def test_without_a_checkpoint_a_resumed_run_begins_its_record_again(
    start: Start, tmp_path: Path
) -> None:
    start(output="run")
    assert steps_on_record(tmp_path / "run") == [("evaluation", 0)]

    start(output="run", resume=True)

    assert steps_on_record(tmp_path / "run") == [("evaluation", 0)]
