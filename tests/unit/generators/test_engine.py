"""The engine step by step: occupancy, prefill, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from headrace.errors import GeneratorFailure, WeightSyncError
from headrace.generators.torch_engine import products
from headrace.generators.torch_engine.block_manager import BlockManager
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.rollout_state import Begun, FinishedRollout, GroupCollector
from headrace.generators.torch_engine.runner import ModelRunner
from headrace.generators.torch_engine.scheduler import Part, Scheduler
from headrace.generators.torch_engine.statistics import Statistics
from headrace.generators.torch_engine.weight_set import TURNS, WeightSet
from headrace.models.decoder import Decoder
from headrace.models.weights import checksum
from headrace.types import GenerationRequest, OnUpdate

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab


class CountingRunner(ModelRunner):
    """Counts the prompt tokens it prefills."""

    num_prefilled = 0

    def prefill(self, parts: Sequence[Part]) -> torch.Tensor:
        self.num_prefilled += sum(part.num_tokens for part in parts)
        return super().prefill(parts)

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes


def engine_of(
    lab: Lab, max_running: int, *, num_blocks: int = 1000, max_prefill_tokens: int = 100
) -> tuple[Engine, CountingRunner]:
    decoder = lab.decoder()
    runner = CountingRunner(decoder.config, 4, torch.float32, torch.device("cpu"))
    blocks = BlockManager(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(blocks, max_running=max_running, max_prefill_tokens=max_prefill_tokens)
    engine = Engine(runner, scheduler, blocks, lab.decode)
    engine.load(lab.update(decoder))
    return engine, runner


def run_out(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[str]]:
    """Return which groups became whole at each step."""
    engine.submit(requests)
    steps = []
    while engine.has_work:
        steps.append([collector.request.group_id for collector in engine.step()])
    return steps


def test_a_prompt_is_prefilled_once_for_its_whole_group(lab: Lab) -> None:
    engine, runner = engine_of(lab, 16)
    run_out(engine, [lab.request("a", range(1, 8), size=8), lab.request("b", (1, 2), size=8)])
    assert runner.num_prefilled == 7 + 2


@pytest.mark.parametrize("max_running", [16, 8, 3])
def test_a_forced_prefix_is_prefilled_once_for_its_whole_group(lab: Lab, max_running: int) -> None:
    engine, runner = engine_of(lab, max_running)
    kw: dict[str, Any] = {"forced_prefix": (9, 8, 7, 6, 5), "size": 8, "max_tokens": 9}
    run_out(engine, [lab.request("a", range(1, 9), **kw)])
    waves = -(-8 // max_running)
    # 13 tokens are three whole blocks and one: what is read again is found, but for the last one.
    assert runner.num_prefilled == 13 + (waves - 1)
    assert engine.statistics.num_found == 12 * (waves - 1)


def test_a_long_rollout_holds_no_other_back(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    requests = [lab.request("long", max_tokens=30)]
    requests += [lab.request(str(i), size=3, max_tokens=3) for i in range(4)]
    steps = run_out(engine, requests)
    assert [name for names in steps for name in names] == ["0", "1", "2", "3", "long"]
    assert len(steps) == 29  # a first step samples two tokens


def test_a_slot_is_taken_again_as_soon_as_it_is_free(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    collectors = engine.submit([lab.request(str(i), max_tokens=2 + 3 * i) for i in range(8)])
    while engine.has_work:
        engine.step()
        # Slots are filled at the start of a step, so one may be free only at its end.
        num_left = sum(not collector.finished for collector in collectors)
        assert engine.num_running <= min(4, num_left)
        assert engine.num_running >= min(3, num_left)


def test_the_cache_of_a_long_run_stays_as_large_as_its_fullest_moment(lab: Lab) -> None:
    engine, runner = engine_of(lab, 8)
    sizes = []
    for index in range(12):
        requests = [lab.request(f"{index}/{k}", size=3, max_tokens=20) for k in range(4)]
        run_out(engine, requests)
        sizes.append(runner.cache_bytes)
    assert len(set(sizes[2:])) == 1
    token_bytes = 2 * 2 * 2 * 32 * 4  # layers, keys and values, kv heads, head size, fp32
    # As much again may be kept for prompts that begin alike, and a quarter is there to grow into.
    assert sizes[-1] <= 2.5 * 8 * (3 + 20 + 1) * token_bytes


def test_weights_never_change_while_something_runs(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    engine.submit([lab.request("a")])
    with pytest.raises(AssertionError, match="two versions"):
        engine.load(lab.update(lab.decoder(1), 2))


def test_dropped_rollouts_leave_and_the_others_go_on_unchanged(lab: Lab) -> None:
    requests = [lab.request(name, size=2, max_tokens=12, seed=i) for i, name in enumerate("abc")]
    alone, _ = engine_of(lab, 4)
    kept = alone.submit([requests[1]])[0]
    while alone.has_work:
        alone.step()
    engine, _ = engine_of(lab, 4)
    first, second, third = engine.submit(requests)
    engine.step()
    engine.drop({first, third})
    assert engine.num_running == 2
    while engine.has_work:
        engine.step()
    assert (len(first.finished), len(third.finished)) == (0, 0)
    assert ids_of(second) == ids_of(kept)


def test_not_finite_weights_leave_nothing_behind_in_the_cache(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    broken = lab.decoder()
    for parameter in broken.parameters():
        parameter.fill_(float("nan"))
    engine.load(lab.update(broken, 2))
    (failed,) = engine.submit([lab.request("a", range(1, 20), size=4)])
    assert engine.step() == [failed]
    assert {rollout.finish_reason for rollout in failed.finished} == {"error"}
    assert not engine.has_work
    engine.load(lab.update(lab.decoder(), 3))
    # The short one is read as wide as the long one: over cells that the broken weights filled.
    steps = run_out(engine, [lab.request("short", (1,)), lab.request("long", range(1, 18))])
    assert {*steps[-1]} == {"short", "long"}


def ids_of(collector: GroupCollector) -> list[tuple[int, ...]]:
    return [rollout.sampled.completion_ids for rollout in collector.finished]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay(lab: Lab, fault: str) -> None:
    engine, _ = engine_of(lab, 4)
    update = lab.update(lab.decoder(1), 2)
    name = "model.norm.weight"
    tensors: dict[str, torch.Tensor] = dict(update.tensors)
    match fault:
        case "missing":
            del tensors[name]
        case "unknown":
            tensors = {**tensors, "model.norm.bias": tensors[name]}
            name = "model.norm.bias"
        case "shape":
            tensors[name] = torch.ones(1)
        case _:
            tensors[name] = tensors[name].bfloat16()
    with pytest.raises(WeightSyncError, match=name):
        engine.load(replace(update, tensors=tensors))
    (collector,) = engine.submit([lab.request("a")])
    while engine.has_work:
        engine.step()
    assert set(collector.finished[0].sampled.policy_versions) == {1}
    untouched, _ = engine_of(lab, 4)
    (expected,) = untouched.submit([lab.request("a")])
    while untouched.has_work:
        untouched.step()
    assert ids_of(collector) == ids_of(expected)


# --- the cache ----------------------------------------------------------------------------------


def finished_of(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, list[Begun]]:
    collectors = engine.submit(requests)
    while engine.has_work:
        engine.step()
    return {
        c.request.group_id: [
            r.sampled for r in sorted(c.finished, key=lambda rollout: rollout.rollout_index)
        ]
        for c in collectors
    }


def many(lab: Lab) -> list[GenerationRequest]:
    return [
        lab.request(str(i), range(i, i + 3 + i), size=3, seed=i, max_tokens=5 + 3 * i)
        for i in range(6)
    ]


def assert_alike(found: dict[str, list[Begun]], expected: dict[str, list[Begun]]) -> None:
    for name, rollouts in expected.items():
        for one, other in zip(found[name], rollouts, strict=True):
            assert one.completion_ids == other.completion_ids
            assert one.generator_logprobs == pytest.approx(other.generator_logprobs, abs=1e-4)


@pytest.mark.parametrize("num_blocks", [10, 14, 25])
def test_a_full_cache_sends_rollouts_back_and_changes_no_token(lab: Lab, num_blocks: int) -> None:
    roomy, _ = engine_of(lab, 32)
    expected = finished_of(roomy, many(lab))
    assert roomy.statistics.num_preemptions == 0
    tight, _ = engine_of(lab, 32, num_blocks=num_blocks)
    assert_alike(finished_of(tight, many(lab)), expected)
    assert tight.statistics.num_preemptions > 0


@pytest.mark.parametrize("num_blocks", [16, 25])
def test_a_rollout_that_was_sent_back_keeps_all_that_was_recorded(
    lab: Lab, num_blocks: int
) -> None:
    kw: dict[str, Any] = {"forced_prefix": (9, 8, 7), "top_p": 0.9, "min_tokens": 9, "size": 4}
    kw |= {"raw_logprobs": True, "kept_support": True, "stop_token_ids": (1, 2), "max_tokens": 25}
    requests = [lab.request(name, (3, 1, 4), seed=i, **kw) for i, name in enumerate("abc")]
    roomy, _ = engine_of(lab, 32)
    expected = finished_of(roomy, requests)
    tight, _ = engine_of(lab, 32, num_blocks=num_blocks)
    found = finished_of(tight, requests)
    assert tight.statistics.num_preemptions > 0
    assert_alike(found, expected)
    for name in "abc":
        for one, other in zip(found[name], expected[name], strict=True):
            assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
            assert one.kept_support == other.kept_support
            assert (
                one.loss_mask
                == other.loss_mask
                == (False,) * 3 + (True,) * (len(one.loss_mask) - 3)
            )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_prompt_prefilled_in_parts_gives_the_same_rollouts(lab: Lab, size: int) -> None:
    whole, _ = engine_of(lab, 32)
    parts, _ = engine_of(lab, 32, max_prefill_tokens=size)
    assert_alike(finished_of(parts, many(lab)), finished_of(whole, many(lab)))


def test_a_second_turn_computes_only_what_is_new(lab: Lab) -> None:
    engine, runner = engine_of(lab, 8)
    first = lab.request("first", range(1, 10), max_tokens=12)
    (sampled,) = finished_of(engine, [first])["first"]
    turn = (*range(1, 10), *sampled.completion_ids, 5, 6)
    runner.num_prefilled = 0
    second = lab.request("second", turn, size=2, max_tokens=6)
    found = finished_of(engine, [second])
    # 9 + 12 - 1 tokens were fed in and cached: five whole blocks of four.
    assert runner.num_prefilled == len(turn) - 20
    fresh, _ = engine_of(lab, 8)
    assert_alike(found, finished_of(fresh, [second]))


def test_no_beginning_is_reused_under_other_weights(lab: Lab) -> None:
    engine, runner = engine_of(lab, 8)
    requests = [lab.request("a", range(1, 20), size=2)]
    finished_of(engine, requests)
    engine.load(lab.update(lab.decoder(1), 2))
    runner.num_prefilled = 0
    finished_of(engine, requests)
    assert runner.num_prefilled == 19


def test_nothing_stays_held_once_everything_ended(lab: Lab) -> None:
    engine, _ = engine_of(lab, 32, num_blocks=14)
    finished_of(engine, many(lab))
    assert engine.num_held_blocks == 0
    collectors = engine.submit(many(lab))
    for _ in range(4):
        engine.step()
    engine.drop(set(collectors))
    assert (engine.num_held_blocks, engine.has_work) == (0, False)
    engine.submit(many(lab))
    engine.step()
    engine.clear()
    assert engine.num_held_blocks == 0


# --- weights that change under unfinished rollouts ----------------------------------------------


def half_way(lab: Lab, engine: Engine) -> list[GroupCollector]:
    """Submit two groups and let each rollout sample three tokens of twelve."""
    requests = [
        lab.request("a", range(1, 10), size=3, max_tokens=12, seed=1),
        lab.request("b", range(5, 25), size=2, max_tokens=12, seed=2),
    ]
    collectors = engine.submit(requests)
    engine.step()
    engine.step()
    return collectors


def finished(engine: Engine, collectors: Sequence[GroupCollector]) -> list[FinishedRollout]:
    while engine.has_work:
        engine.step()
    return [rollout for collector in collectors for rollout in collector.finished]


def gap_after(lab: Lab, decoder: Decoder, prompt: Sequence[int], sampled: Begun, at: int) -> float:
    """Largest difference of log-probs from ``at`` on to a full pass under ``decoder``."""
    logits = lab.logits(decoder, prompt, sampled.completion_ids)
    ids = torch.tensor(sampled.completion_ids).unsqueeze(1)
    expected = torch.log_softmax(logits, -1).gather(1, ids).squeeze(1)
    return float((expected - torch.tensor(sampled.generator_logprobs))[at:].abs().max())


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_every_token_carries_the_version_that_sampled_it(lab: Lab, on_update: OnUpdate) -> None:
    engine, _ = engine_of(lab, 16)
    collectors = half_way(lab, engine)
    engine.load(lab.update(lab.decoder(1), 2), on_update)
    versions = {rollout.sampled.policy_versions for rollout in finished(engine, collectors)}
    assert versions == {(2,) * 12 if on_update == "restart" else (1,) * 3 + (2,) * 9}


def test_kept_rollouts_go_on_without_computing_anything_again(lab: Lab) -> None:
    engine, runner = engine_of(lab, 16)
    collectors = half_way(lab, engine)
    runner.num_prefilled = 0
    other = lab.decoder(1)
    engine.load(lab.update(other, 2), "keep")
    rollouts = finished(engine, collectors)
    assert runner.num_prefilled == 0
    # Their cache is of the old weights, so the log-probs are those of neither version alone.
    assert gap_after(lab, other, range(1, 10), rollouts[0].sampled, 3) > 1e-2


def test_recomputed_rollouts_go_on_as_if_the_new_weights_had_read_it_all(lab: Lab) -> None:
    engine, _ = engine_of(lab, 16)
    collectors = half_way(lab, engine)
    other = lab.decoder(1)
    engine.load(lab.update(other, 2), "recompute")
    finished(engine, collectors)
    for collector in collectors:
        for rollout in collector.finished:
            prompt = collector.request.prompt.token_ids
            assert gap_after(lab, other, prompt, rollout.sampled, 3) < 1e-4


def test_a_groups_prompt_is_recomputed_once_for_all_its_rollouts(lab: Lab) -> None:
    engine, runner = engine_of(lab, 16)
    (collector,) = engine.submit([lab.request("a", range(1, 10), size=6, max_tokens=12)])
    engine.step()
    runner.num_prefilled = 0
    engine.load(lab.update(lab.decoder(1), 2), "recompute")
    finished(engine, [collector])
    # Two whole blocks of four are shared: 8 tokens once, and 9 + 2 - 8 of each rollout.
    assert runner.num_prefilled == 8 + 6 * 3


def test_restarted_rollouts_are_those_of_the_new_weights_alone(lab: Lab) -> None:
    engine, _ = engine_of(lab, 16)
    collectors = half_way(lab, engine)
    engine.load(lab.update(lab.decoder(1), 2), "restart")
    restarted = finished(engine, collectors)
    fresh, _ = engine_of(lab, 16)
    fresh.load(lab.update(lab.decoder(1), 2))
    expected = finished(fresh, half_way(lab, fresh))
    assert [r.sampled.completion_ids for r in restarted] == [
        r.sampled.completion_ids for r in expected
    ]


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_a_forced_prefix_is_of_the_weights_that_a_rollout_started_with(
    lab: Lab, on_update: OnUpdate
) -> None:
    engine, _ = engine_of(lab, 2)
    kw: dict[str, Any] = {"forced_prefix": (9, 8), "size": 2, "max_tokens": 8}
    collectors = engine.submit([lab.request(name, (3, 1, 4), **kw) for name in "ab"])
    for _ in range(3):
        engine.step()
    engine.load(lab.update(lab.decoder(1), 2), on_update)
    while engine.has_work:
        engine.step()
    first, second = (c.finished[0].sampled.policy_versions for c in collectors)
    old = 0 if on_update == "restart" else 2 + 4
    assert first == (1,) * old + (2,) * (8 - old)
    assert second == (2,) * 8, "it waited, and started under the new weights"


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
@pytest.mark.parametrize(
    ("fault", "words"), [({"tensors": {}}, "was not published"), ({"checksum": 1}, "checksum")]
)
def test_refused_weights_change_nothing_for_rollouts_in_flight(
    lab: Lab, on_update: OnUpdate, fault: dict[str, Any], words: str
) -> None:
    engine, _ = engine_of(lab, 16)
    collectors = half_way(lab, engine)
    update = lab.update(lab.decoder(1), 2)
    with pytest.raises(WeightSyncError, match=words):
        engine.load(replace(update, **fault), on_update)
    untouched, _ = engine_of(lab, 16)
    expected = finished(untouched, half_way(lab, untouched))
    assert [r.sampled for r in finished(engine, collectors)] == [r.sampled for r in expected]


class LossyRunner(CountingRunner):
    """Leaves one weight out when it is told to."""

    loses = ""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        kept = {
            name: torch.zeros_like(t) if name == self.loses else t for name, t in tensors.items()
        }
        super().load(kept)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_nothing_is_sampled_from_weights_that_are_not_held_as_they_came(
    lab: Lab, lost: str
) -> None:
    decoder = lab.decoder()
    runner = LossyRunner(decoder.config, 4, torch.float32, torch.device("cpu"))
    blocks = BlockManager(num_blocks=100, block_size=4)
    scheduler = Scheduler(blocks, max_running=16, max_prefill_tokens=100)
    engine = Engine(runner, scheduler, blocks, lab.decode)
    runner.loses = lost
    with pytest.raises(WeightSyncError, match=lost):
        engine.load(lab.update(decoder))
    with pytest.raises(GeneratorFailure, match="version 1 did not arrive whole"):
        engine.submit([lab.request("a")])
    with pytest.raises(WeightSyncError, match=lost):
        engine.load(lab.update(decoder, 2))


def complaint(runner: ModelRunner, tensors: Mapping[str, Tensor]) -> str:
    try:
        runner.verify(tensors, checksum(tensors.items()))
    except WeightSyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_lost_later_is_found_at_once(lab: Lab, lost: str) -> None:
    runner = LossyRunner(lab.config(), 4, torch.float32, torch.device("cpu"))
    tensors = lab.update(lab.decoder()).tensors
    for loses in ("", "", lost, ""):
        runner.loses = loses
        runner.load(tensors)
        complained = complaint(runner, tensors)
        assert complained == (f"{loses} is not held as it was published" if loses else "")


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have eight bits held on every processor, whether its products of them are exact or not."""
    monkeypatch.setattr(products, "can_multiply_int8", lambda _: True)


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("copy", ["rows", "product"])
def test_both_copies_of_a_tied_embedding_are_read_back(
    lab: Lab, copy: str, *, is_quantized: bool
) -> None:
    tensors = lab.update(lab.decoder(tie_word_embeddings=True)).tensors
    other = {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"] * 2}
    held = WeightSet(
        lab.config(tie_word_embeddings=True),
        torch.float32,
        torch.device("cpu"),
        is_quantized=is_quantized,
    )
    held.load(tensors)
    held.verify(tensors, checksum(tensors.items()))
    held.load(tensors)
    if copy == "rows":
        held.decoder.get_parameter("model.embed_tokens.weight").mul_(2)
    else:
        held.products.units[-1].load(other)
        held._turn = TURNS + len(held.products.units) - 1  # when a rounded one is compared
    with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight is not held as"):
        held.verify(tensors, checksum(tensors.items()))


@pytest.mark.usefixtures("eight_bits")
def test_a_matrix_that_is_rounded_otherwise_later_is_found_within_so_many_updates(
    lab: Lab,
) -> None:
    device = torch.device("cpu")
    runner = LossyRunner(lab.config(), 4, torch.float32, device, is_quantized=True)
    runner.load(tensors := lab.update(lab.decoder()).tensors)
    runner.verify(tensors, checksum(tensors.items()))
    runner.loses = "model.layers.0.mlp.down_proj.weight"
    found = ""
    for _ in range(TURNS):
        runner.load(tensors)
        found = found or complaint(runner, tensors)
    lost = "model.layers.0.mlp.down_proj.weight is not held as it was published"
    assert found == lost
    runner.load(tensors)
    assert complaint(runner, tensors) == lost, "after a failure all are looked at again"


# --- what is counted ----------------------------------------------------------------------------


def test_the_engine_says_how_full_it_ran_and_what_it_found(lab: Lab) -> None:
    engine, _ = engine_of(lab, 4)
    requests = [lab.request("a", range(1, 10), size=2, max_tokens=4)]
    finished_of(engine, requests)
    finished_of(engine, [replace(requests[0], group_id="b")])
    metrics = engine.statistics.metrics()
    # A first step samples two tokens, so four tokens take three.
    assert metrics["generator/engine/num_steps"] == 6
    assert metrics["generator/engine/mean_running"] == 2
    assert metrics["generator/cache/found_share"] == pytest.approx(8 / 18)
    # Two whole blocks of the prompt, and one or two of each rollout's own.
    assert metrics["generator/cache/max_blocks_held"] == 2 + 2
    assert metrics["generator/engine/num_preemptions"] == 0
    assert metrics["generator/rollout/p99_tokens"] == 4
    assert metrics["generator/engine/occupied_share"] == 0.5
    assert metrics["generator/cache/max_held_share"] == (2 + 2) / 1000
    assert metrics["generator/engine/tokens_per_second"] > 0
    assert metrics["generator/first_token/p50_seconds"] <= metrics["generator/rollout/p99_seconds"]


def test_what_was_not_counted_is_left_out() -> None:
    assert set(Statistics().metrics()) == {
        "generator/engine/num_steps",
        "generator/engine/num_preemptions",
        "generator/engine/num_aborted",
        "generator/engine/num_continued",
        "generator/engine/num_failed",
        "generator/cache/max_blocks_held",
        "generator/idle/share",
        "generator/idle/no_requests_seconds",
        "generator/idle/paused_seconds",
        "generator/idle/weights_seconds",
    }
