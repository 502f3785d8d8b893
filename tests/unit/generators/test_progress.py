"""What an engine tells of unfinished rollouts, another one goes on from; and it tells it once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.generators import TorchGenerator
from headrace.generators.pool.saved import SavedGroup
from headrace.generators.progress import Mark, Progress
from headrace.generators.torch_engine.engine import Engine
from headrace.generators.torch_engine.rollout_state import GroupCollector
from headrace.types import GenerationRequest, OnUpdate, Rollout

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab

NEWEST = 9
sizes = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 20))


def save(engine: Engine, saved: Mapping[str, SavedGroup]) -> Progress:
    """Ask for what is new and hold it."""
    progress = engine.progress({name: group.marks() for name, group in saved.items()})
    for name, parts in progress.parts.items():
        for part in parts:
            saved[name].take(part, NEWEST)
    return progress


def nothing_of(requests: Sequence[GenerationRequest]) -> dict[str, SavedGroup]:
    return {request.group_id: SavedGroup(request, request.begun) for request in requests}


def as_far_as(engine: Engine, collector: GroupCollector) -> dict[int, Rollout]:
    """What the engine would go on from, and what has ended."""
    own = [t for t in engine._running.tickets if t.collector is collector]
    rows = {t.rollout_index: engine._running.tickets.index(t) for t in own}
    found = {r.rollout_index: r for r in collector.ended_before}
    for finished in collector.finished:
        found[finished.rollout_index] = finished.to_rollout("")
    for ticket in [*own, *engine._scheduler.tickets]:
        if ticket.collector is collector:
            row = rows.get(ticket.rollout_index)
            begun = ticket.begun if row is None else engine._running.sampled(row)
            if begun.completion_ids:
                now = replace(ticket, begun=begun).taken_back()
                found[ticket.rollout_index] = now.to_rollout("")
    return found


@settings(
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    jobs=st.lists(sizes, min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    num_blocks=st.sampled_from([9, 16, 1000]),
    max_prefill_tokens=st.sampled_from([1, 100]),
    max_running=st.integers(1, 8),
    controls=st.fixed_dictionaries(
        {
            "forced_prefix": st.sampled_from([(), (4, 8)]),
            "raw_logprobs": st.booleans(),
            "kept_support": st.booleans(),
            "top_k": st.sampled_from([0, 20]),
        }
    ),
)
def test_who_goes_on_from_what_was_told_samples_what_would_have_been(
    lab: Lab,
    jobs: list[tuple[int, int, int]],
    cuts: list[int],
    num_blocks: int,
    max_prefill_tokens: int,
    max_running: int,
    controls: dict[str, Any],
) -> None:
    decoder = lab.decoder()
    requests = [
        lab.request(
            str(i),
            range(1, 1 + length),
            size=size,
            seed=i,
            max_tokens=most + 3,
            stop_token_ids=(5, 6),
            **controls,
        )
        for i, (length, size, most) in enumerate(jobs)
    ]
    expected = lab.run_out(lab.engine(decoder), requests)
    engine = lab.engine(
        decoder,
        max_running=max_running,
        num_blocks=num_blocks,
        max_prefill_tokens=max_prefill_tokens,
    )
    saved = nothing_of(requests)
    collectors = engine.submit(requests)
    for num_steps in cuts:
        for _ in range(num_steps):
            engine.step()
        save(engine, saved)
        assert not save(engine, saved).parts, "told twice"
        for collector in collectors:
            if not collector.is_whole:
                told = saved[collector.request.group_id].rollouts()
                told = tuple(replace(rollout, text="") for rollout in told)
                assert {r.rollout_index: r for r in told} == as_far_as(engine, collector)
    # The engine is lost with all that it has, and another one is given what is known.
    again = [
        replace(request, begun=saved[request.group_id].rollouts())
        for request, collector in zip(requests, collectors, strict=True)
        if not collector.is_whole
    ]
    other = lab.engine(decoder, max_running=3, num_blocks=12)
    lab.assert_alike(lab.run_out(other, again), {a.group_id: expected[a.group_id] for a in again})


@pytest.mark.parametrize("is_asked_between", [True, False])
@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_what_began_anew_under_other_weights_is_told_from_its_first_token(
    lab: Lab, on_update: OnUpdate, *, is_asked_between: bool
) -> None:
    engine = lab.engine(lab.decoder())
    request = lab.request("a", size=3, max_tokens=24, forced_prefix=(4, 8))
    saved = nothing_of([request])
    (collector,) = engine.submit([request])
    for _ in range(4):
        engine.step()
    save(engine, saved)
    engine.load(lab.update(lab.decoder(1), 2), on_update)
    if is_asked_between:
        save(engine, saved)
    # Longer than it was before: its length does not tell.
    for _ in range(9):
        engine.step()
    save(engine, saved)
    told = {rollout.rollout_index: rollout for rollout in saved["a"].rollouts()}
    assert told == as_far_as(engine, collector)
    versions = {span.policy_version for rollout in told.values() for span in rollout.version_spans}
    assert versions == ({2} if on_update == "restart" else {1, 2})


def test_groups_that_are_open_twice_or_that_nobody_marks_are_not_told(lab: Lab) -> None:
    engine = lab.engine(lab.decoder())
    engine.submit([lab.request("a", max_tokens=20), lab.request("b", max_tokens=20)])
    engine.submit([lab.request("a", max_tokens=20, seed=1)])
    for _ in range(3):
        engine.step()
    mark = {0: Mark(num_tokens=0, last_version=-1)}
    assert set(engine.progress({"a": mark, "b": mark, "c": mark}).parts) == {"b"}
    assert not engine.progress({"a": mark}).parts
    assert not engine.progress({"b": {}}).parts


def test_a_generator_tells_how_far_it_is_and_another_one_has_the_same_bits(lab: Lab) -> None:
    decoder = lab.decoder(max_position_embeddings=1024)
    request = lab.request("a", size=3, max_tokens=200, stop_token_ids=(5,))

    async def main() -> None:
        async def made() -> TorchGenerator:
            generator = lab.generator(decoder.config, batch_invariant=True)
            await generator.update_weights(lab.update(decoder))
            return generator

        first, second = await made(), await made()
        (whole,) = (await lab.collect(second, [request])).values()
        saved = SavedGroup(request, ())
        # Of what was whole before it was asked of, nothing is told: once more then.
        while not saved.num_tokens:
            call = asyncio.ensure_future(lab.collect(first, [request]))
            while not call.done() and saved.num_tokens < 20:
                progress = await first.progress({"a": saved.marks()})
                for part in progress.parts.get("a", ()):
                    saved.take(part, 1)
            call.cancel()
            await asyncio.wait({call})
        await first.close()
        begun = saved.rollouts()
        assert sum(len(rollout.completion_ids) for rollout in begun) == saved.num_tokens
        (again,) = (await lab.collect(second, [replace(request, begun=begun)])).values()
        assert again == whole
        await second.close()

    asyncio.run(main())
