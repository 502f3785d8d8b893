"""Rollouts that are taken back and go on: nothing of them is lost, and nothing sampled twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import GeneratorFailure
from headrace.generators.admission import check_requests
from headrace.generators.torch_engine.engine import Engine
from headrace.types import GenerationRequest, OnUpdate, Rollout, RolloutGroup, VersionSpan

if TYPE_CHECKING:
    from tests.unit.generators.conftest import Lab


def interrupted(
    lab: Lab, engines: Sequence[Engine], requests: Sequence[GenerationRequest], cuts: Sequence[int]
) -> dict[str, RolloutGroup]:
    """Run to the end, but take everything back after each of ``cuts`` steps and change engines."""
    done: dict[str, RolloutGroup] = {}
    turns = cycle(engines)
    for num_steps, engine in zip(cuts, turns, strict=False):
        if not requests:
            return done
        collectors = engine.submit(requests)
        for _ in range(num_steps):
            engine.step()
        engine.abort({c for c in collectors if not c.is_whole})
        assert (engine.has_work, engine.num_held_blocks) == (False, 0)
        requests = []
        for collector in collectors:
            request, group = collector.request, collector.group(lab.decode)
            if any(rollout.may_go_on for rollout in group.rollouts):
                requests.append(replace(request, begun=group.rollouts))
            else:
                done[request.group_id] = group
    return done | lab.run_out(next(turns), requests)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 20))


@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    jobs=st.lists(sizes, min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    num_blocks=st.sampled_from([9, 16, 1000]),
    max_prefill_tokens=st.sampled_from([1, 3, 100]),
    max_running=st.integers(1, 8),
    controls=st.fixed_dictionaries(
        {
            "forced_prefix": st.sampled_from([(), (4, 8)]),
            "min_tokens": st.sampled_from([0, 3]),
            "raw_logprobs": st.booleans(),
            "kept_support": st.booleans(),
            "top_k": st.sampled_from([0, 20]),
        }
    ),
)
def test_however_often_interrupted_a_rollout_is_the_one_that_never_was(
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
            stop_strings=("BC", "X"),
            **controls,
        )
        for i, (length, size, most) in enumerate(jobs)
    ]
    expected = lab.run_out(lab.engine(decoder), requests)
    kw: dict[str, Any] = {"num_blocks": num_blocks, "max_prefill_tokens": max_prefill_tokens}
    engines = [
        lab.engine(decoder, max_running=max_running, **kw),
        lab.engine(decoder, max_running=3, num_blocks=12),
    ]
    lab.assert_alike(interrupted(lab, engines, requests, cuts), expected)


def test_a_full_cache_and_parts_of_a_prefill_meet_interrupted_rollouts(lab: Lab) -> None:
    decoder = lab.decoder()
    requests = [
        lab.request(str(i), range(i, i + 6), size=3, seed=i, max_tokens=24) for i in range(4)
    ]
    expected = lab.run_out(lab.engine(decoder), requests)
    engines = [lab.engine(decoder, num_blocks=14, max_prefill_tokens=4) for _ in range(2)]
    lab.assert_alike(interrupted(lab, engines, requests, [30, 30, 30]), expected)
    for engine in engines:
        assert engine.statistics.num_preemptions > 0
        assert engine.statistics.num_aborted > 0
    assert engines[1].statistics.num_continued > 0


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_string_that_lies_across_the_seam_still_ends(lab: Lab, cut: int) -> None:
    decoder = lab.decoder()
    plain = lab.request("a", max_tokens=20, seed=3)
    text = lab.run_out(lab.engine(decoder), [plain])["a"].rollouts[0].text
    sampling = replace(plain.sampling, stop_strings=(text[4:8],))
    request = replace(plain, sampling=sampling)
    expected = lab.run_out(lab.engine(decoder), [request])
    assert expected["a"].rollouts[0].finish_reason == "stop"
    engines = [lab.engine(decoder), lab.engine(decoder)]
    lab.assert_alike(interrupted(lab, engines, [request], [cut]), expected)


def test_one_of_two_groups_is_taken_back_and_the_other_goes_on(lab: Lab) -> None:
    decoder = lab.decoder()
    requests = [lab.request(name, size=3, seed=i, max_tokens=12) for i, name in enumerate("ab")]
    expected = lab.run_out(lab.engine(decoder), requests)
    engine = lab.engine(decoder, max_running=4)
    first, second = engine.submit(requests)
    for _ in range(3):
        engine.step()
    engine.abort({first})
    taken_back = first.group(lab.decode).rollouts
    assert [rollout.finish_reason for rollout in taken_back] == ["abort"] * 3
    assert [len(rollout.completion_ids) for rollout in taken_back] == [4, 4, 4]
    while engine.has_work:
        engine.step()
    lab.assert_alike({"b": second.group(lab.decode)}, {"b": expected["b"]})


def test_what_waits_for_a_slot_is_taken_back_without_a_token(lab: Lab) -> None:
    engine = lab.engine(lab.decoder(), max_running=1)
    (collector,) = engine.submit([lab.request("a", size=3)])
    engine.step()
    engine.abort({collector})
    lengths = [len(rollout.completion_ids) for rollout in collector.group(lab.decode).rollouts]
    assert lengths == [2, 0, 0]
    assert engine.statistics.num_aborted == 3


def begun(index: int, ids: Sequence[int] = (1, 2), **changes: Any) -> Rollout:  # noqa: ANN401 - any field
    fields: dict[str, Any] = {
        "rollout_index": index,
        "completion_ids": tuple(ids),
        "loss_mask": (True,) * len(ids),
        "generator_logprobs": (-0.5,) * len(ids),
        "version_spans": (VersionSpan(policy_version=0, start=0, end=len(ids)),) if ids else (),
        "finish_reason": "abort",
        "text": "AB",
    }
    return Rollout(**fields | changes)


def test_rollouts_that_have_ended_are_given_back_as_they_are_and_missing_ones_begin(
    lab: Lab,
) -> None:
    decoder = lab.decoder()
    request = lab.request("a", size=4, max_tokens=6)
    fresh = lab.run_out(lab.engine(decoder), [request])["a"].rollouts
    ended = begun(2, finish_reason="stop", text="not even decoded again")
    failed = begun(0, (), finish_reason="error")
    engine = lab.engine(decoder)
    group = lab.run_out(engine, [replace(request, begun=(ended, failed))])["a"]
    assert group.rollouts == (failed, fresh[1], ended, fresh[3])
    assert engine.statistics.num_continued == 0


def test_tokens_that_came_in_keep_version_log_prob_and_mask_through_a_full_cache(lab: Lab) -> None:
    decoder = lab.decoder()
    came = [
        begun(
            index,
            (4, 5, 6, 7),
            loss_mask=(False, True, True, False),
            generator_logprobs=(0.0, -1.5, -2.5, 0.0),
            version_spans=(
                VersionSpan(policy_version=3, start=0, end=2),
                VersionSpan(policy_version=9, start=2, end=4),
            ),
        )
        for index in range(4)
    ]
    engine = lab.engine(decoder, num_blocks=12)
    engine.load(lab.update(decoder, 11))
    request = replace(lab.request("a", size=4, max_tokens=20), begun=tuple(came))
    group = lab.run_out(engine, [request])["a"]
    assert engine.statistics.num_preemptions > 0
    assert len({rollout.completion_ids for rollout in group.rollouts}) == 4
    for rollout, start in zip(group.rollouts, came, strict=True):
        assert rollout.completion_ids[:4] == start.completion_ids
        assert rollout.loss_mask == (*start.loss_mask, *(True,) * 16)
        assert rollout.generator_logprobs[:4] == start.generator_logprobs
        assert [s.policy_version for s in rollout.version_spans] == [3, 9, 11]
        assert [s.end for s in rollout.version_spans] == [2, 4, 20]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ids": (1, 2, 3)}, "length"),
        ({"ids": (1, 9)}, "stop"),
        ({"ids": (9, 1)}, None),
        ({"ids": (1, 9), "loss_mask": (True, False)}, None),
    ],
)
def test_what_was_taken_back_at_its_very_end_goes_no_further(
    lab: Lab, changes: dict[str, Any], reason: str | None
) -> None:
    rollout = begun(0, **changes)
    request = lab.request("a", size=2, max_tokens=3, stop_token_ids=(9,))
    engine = lab.engine(lab.decoder())
    group = lab.run_out(engine, [replace(request, begun=(rollout,))])["a"]
    if reason is None:
        assert len(group.rollouts[0].completion_ids) == 3
    else:
        assert group.rollouts[0] == replace(rollout, finish_reason=reason)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        (
            begun(1, tuple(range(1, 10))),
            "rollout 1 has 9 tokens, more than sampling.max_tokens = 8",
        ),
        (begun(1, (3, 50)), r"begun rollout 1 holds token ids 3 to 50.* vocabulary of 50"),
        (begun(1, (-1, 3)), r"begun rollout 1 holds token ids -1 to 3.* vocabulary of 50"),
        (begun(1, (3,), generator_logprobs=(float("nan"),)), "log-probs that are not finite"),
    ],
)
def test_begun_rollouts_that_cannot_go_on_are_refused(
    lab: Lab, rollout: Rollout, words: str
) -> None:
    request = replace(lab.request("a", size=2), begun=(rollout,))
    with pytest.raises(GeneratorFailure, match=f"group a .*{words}"):
        check_requests([request], lab.config(), max_cached_tokens=1000)


# --- weights that change ------------------------------------------------------------------------


def versions(rollout: Rollout) -> list[int]:
    return [s.policy_version for s in rollout.version_spans for _ in range(s.start, s.end)]


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_a_rollout_that_came_in_begun_follows_a_weight_update_as_any_other(
    lab: Lab, on_update: OnUpdate
) -> None:
    engine = lab.engine(lab.decoder())
    given = begun(0, (4, 5, 6), loss_mask=(False, False, True))
    (collector,) = engine.submit([replace(lab.request("a", size=2), begun=(given,))])
    engine.step()
    engine.load(lab.update(lab.decoder(1), 2), on_update)
    while engine.has_work:
        engine.step()
    came, fresh = collector.group(lab.decode).rollouts
    if on_update == "restart":
        # At the prompt: only what nobody sampled stays, as if it had been given a second time.
        assert came.completion_ids[:2] == (4, 5)
        assert came.loss_mask == (False,) * 2 + (True,) * 6
        assert (versions(came), versions(fresh)) == ([2] * 8, [2] * 8)
    else:
        assert came.completion_ids[:3] == (4, 5, 6)
        assert (versions(came), versions(fresh)) == ([0, 0, 0, 1, 1, 2, 2, 2], [1, 1] + [2] * 6)


@pytest.mark.parametrize("on_update", ["keep", "recompute", "restart"])
def test_rollouts_that_wait_for_room_follow_a_weight_update_as_well(
    lab: Lab, on_update: OnUpdate
) -> None:
    engine = lab.engine(lab.decoder(), num_blocks=9)
    (collector,) = engine.submit([lab.request("a", size=6, max_tokens=16)])
    while engine.statistics.num_preemptions < 3:
        engine.step()
    engine.load(lab.update(lab.decoder(1), 2), on_update)
    while engine.has_work:
        engine.step()
    found = {tuple(sorted(set(versions(r)))) for r in collector.group(lab.decode).rollouts}
    assert ((1, 2) in found) is (on_update != "restart")
    assert found <= ({(2,), (1, 2), (1,)} if on_update != "restart" else {(2,), (1,)})


@pytest.mark.parametrize("half", [False, True], ids=["running", "half prefilled"])
def test_a_cache_that_was_kept_serves_the_rollouts_it_was_kept_for_and_no_others(
    lab: Lab, half: bool
) -> None:
    prompt, other = range(1, 22), lab.decoder(1)
    engine = lab.engine(lab.decoder(), max_prefill_tokens=5 if half else 100)
    engine.submit([lab.request("a", prompt, max_tokens=6)])
    engine.step()
    assert engine.num_running == (0 if half else 1)
    engine.load(lab.update(other, 2), "keep")
    while engine.has_work:
        engine.step()
    found = lab.run_out(engine, [lab.request("b", prompt, size=2)])
    lab.assert_alike(
        found, replaced(lab.run_out(lab.engine(other), [lab.request("b", prompt, size=2)]))
    )


def replaced(groups: Mapping[str, RolloutGroup]) -> dict[str, RolloutGroup]:
    """The same groups, as version 2 would have sampled them."""
    return {
        name: replace(
            group,
            rollouts=tuple(
                replace(
                    rollout,
                    version_spans=tuple(
                        replace(s, policy_version=2) for s in rollout.version_spans
                    ),
                )
                for rollout in group.rollouts
            ),
        )
        for name, group in groups.items()
    }
