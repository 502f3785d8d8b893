import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import AlarmConfig, DriftConfig
from headrace.monitors import Alarms, JsonlMonitor, canary_metrics, read_run
from headrace.monitors.alarms import _trend
from headrace.types import EvaluationRecord, RolloutGroup, RunEvent, StepRecord

MakeGroup = Callable[..., RolloutGroup]
REWARD = "verifier/reward/raw_mean"
QUALITY = "eval/greedy/pass_at_1"


def config(**fields: object) -> AlarmConfig:
    return AlarmConfig.model_validate(fields)


def step(
    number: int, reward: float | None = None, groups: Sequence[RolloutGroup] = ()
) -> StepRecord:
    metrics = {} if reward is None else {REWARD: reward}
    return StepRecord(
        step=number, num_steps=99, policy_version=number, metrics=metrics, groups=tuple(groups)
    )


def evaluation(number: int, metrics: Mapping[str, float]) -> EvaluationRecord:
    return EvaluationRecord(step=number, policy_version=number, metrics=metrics, groups=())


def drifted(
    alarms: Alarms, rewards: Sequence[float], qualities: Sequence[float], name: str = QUALITY
) -> list[int]:
    """Return the evaluations, counted from 0, that an alarm sounded at; one step before each."""
    found = []
    for place, (reward, quality) in enumerate(zip(rewards, qualities, strict=True)):
        alarms.after_step(step(place + 1, reward))
        if alarms.after_evaluation(evaluation(place + 1, {name: quality}), ()):
            found.append(place)
    return found


UP = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
DOWN = [0.6, 0.55, 0.5, 0.45, 0.4, 0.35]


def test_reward_that_rises_while_quality_falls_sounds_once() -> None:
    assert drifted(Alarms(config(drift={"window": 4})), UP, DOWN) == [3]


@pytest.mark.parametrize(
    ("rewards", "qualities"),
    [
        (UP, UP),
        (DOWN, DOWN),
        (UP, [0.5] * 6),
        ([0.5] * 6, DOWN),
        (UP, [0.6, 0.4, 0.6, 0.4, 0.6, 0.5]),
    ],
)
def test_any_other_pair_of_trends_is_silent(rewards: list[float], qualities: list[float]) -> None:
    assert drifted(Alarms(config(drift={"window": 4, "fall": 0.13})), rewards, qualities) == []


def test_a_drift_that_was_over_sounds_again() -> None:
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    qualities = [0.9, 0.7, 0.5, 0.6, 0.7, 0.8, 0.6, 0.4, 0.2]
    assert drifted(Alarms(config(drift={"window": 3})), rewards, qualities) == [2, 6]


def test_thresholds_are_those_of_the_whole_window() -> None:
    assert drifted(Alarms(config(drift={"window": 4, "fall": 0.149})), UP[:4], DOWN[:4]) == [3]
    assert drifted(Alarms(config(drift={"window": 4, "fall": 0.151})), UP[:4], DOWN[:4]) == []
    assert drifted(Alarms(config(drift={"window": 4, "rise": 0.299})), UP[:4], DOWN[:4]) == [3]
    assert drifted(Alarms(config(drift={"window": 4, "rise": 0.301})), UP[:4], DOWN[:4]) == []
    assert _trend(UP[:4]) == pytest.approx(0.3)


def test_quality_may_be_that_of_one_component() -> None:
    gold = "eval/sampled/component/gold/mean"
    watching = config(drift={"window": 4, "component": "gold"})
    assert drifted(Alarms(watching), UP, DOWN, gold) == [3]
    assert drifted(Alarms(watching), UP, DOWN) == []


def test_an_evaluation_before_any_step_is_no_point_of_the_trend() -> None:
    alarms = Alarms(config(drift={"window": 3}))
    assert alarms.after_evaluation(evaluation(0, {QUALITY: 0.99}), ()) == ()
    assert drifted(alarms, UP[:2], DOWN[:2]) == []


def test_an_alarm_may_be_left_out(make_group: MakeGroup) -> None:
    alarms = Alarms(config(drift=None, max_label_share=None))
    assert drifted(alarms, UP, DOWN) == []
    assert alarms.after_step(step(1, 0.5, [labelled(make_group, [1.0] * 8, 8)])) == ()


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.floats(-3, 3))
def test_the_trend_of_a_line_is_its_rise_and_noise_around_it_adds_its_own(
    noise: list[float], slope: float
) -> None:
    line = [slope * place + 1.5 for place in range(len(noise))]
    assert _trend(line) == pytest.approx(slope * (len(line) - 1), abs=1e-9)
    both = [a + b for a, b in zip(line, noise, strict=True)]
    assert _trend(both) == pytest.approx(_trend(line) + _trend(noise), abs=1e-6)


def labelled(
    make_group: MakeGroup, rewards: Sequence[float], num_labelled: int, label: str = "exits_early"
) -> RolloutGroup:
    group = make_group(rewards)
    assert group.verdicts is not None
    return group.scored(
        [
            dataclasses.replace(verdict, labels=(label,) if place < num_labelled else ())
            for place, verdict in enumerate(group.verdicts)
        ]
    )


def test_a_label_on_most_of_what_passed_sounds_once_until_it_is_rare_again(
    make_group: MakeGroup,
) -> None:
    alarms = Alarms(config())

    def sounds(num_labelled: int) -> bool:
        group = labelled(make_group, [1.0] * 10 + [0.0] * 6, num_labelled)
        return bool(alarms.after_step(step(1, 0.5, [group])))

    assert [sounds(n) for n in (5, 6, 9, 4, 8, 2, 8)] == [
        False,
        True,
        False,
        False,
        False,
        False,
        True,
    ]


def test_labels_of_what_did_not_pass_are_no_alarm(make_group: MakeGroup) -> None:
    failed = labelled(make_group, [0.0] * 20, 20)
    passed = labelled(make_group, [1.0] * 20, 0)
    assert Alarms(config()).after_step(step(1, 0.5, [failed, passed])) == ()


def test_few_rollouts_say_nothing(make_group: MakeGroup) -> None:
    assert Alarms(config()).after_step(step(1, 0.5, [labelled(make_group, [1.0] * 7, 7)])) == ()


def test_a_canary_that_passes_sounds_every_time_and_is_shown(make_group: MakeGroup) -> None:
    alarms = Alarms(config())
    canaries = [make_group([0.0, None]), make_group([0.0, 1.0], prompt_id="impossible")]
    for number in (0, 10):
        (alarm,) = alarms.after_evaluation(evaluation(number, {}), canaries)
        assert (alarm.kind, alarm.step, alarm.fields["alarm"]) == ("alarm", number, "canary")
        assert "1 rollouts passed a task that cannot be solved" in alarm.message
        assert alarm.fields["prompt_id"] == "impossible"
        assert alarm.fields["completion"]
    assert canary_metrics(canaries) == {
        "eval/canary/num_scored": 3.0,
        "eval/canary/num_passed": 1.0,
    }


def test_canaries_that_fail_or_were_not_scored_are_silent(make_group: MakeGroup) -> None:
    canaries = [make_group([0.0, 0.0]), make_group([None, None])]
    assert Alarms(config()).after_evaluation(evaluation(0, {}), canaries) == ()


def test_a_resumed_run_goes_on_with_the_trend_that_it_had(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ticks = iter(range(100))
    monitor = JsonlMonitor(tmp_path, clock=lambda: float(next(ticks)))
    whole = Alarms(config(drift={"window": 4}))
    monitor.on_evaluation(evaluation(0, {QUALITY: 0.9}))
    for place in range(3):
        monitor.on_step(step(place + 1, UP[place]))
        monitor.on_evaluation(evaluation(place + 1, {QUALITY: DOWN[place]}))
    monitor.on_event(RunEvent(kind="stop", step=3, message="stopped"))
    monitor.close()
    resumed = Alarms(config(drift={"window": 4}))
    resumed.recall(read_run(tmp_path))
    assert drifted(whole, UP[:4], DOWN[:4]) == [3]
    assert drifted(resumed, UP[3:4], DOWN[3:4]) == [0]


def test_alarms_are_plain_json(make_group: MakeGroup) -> None:
    alarms = Alarms(config())
    group = labelled(make_group, [1.0] * 8, 8)
    events = (
        *alarms.after_step(step(1, 1.0, [group])),
        *alarms.after_evaluation(evaluation(1, {}), [group]),
    )
    assert [event.fields["alarm"] for event in events] == ["label", "canary"]
    json.dumps([dict(event.fields) for event in events])


def test_a_window_of_two_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match="window"):
        DriftConfig(window=2)
