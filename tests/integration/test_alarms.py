"""A reward that can be cheated, a canary that shows it, and what a recipe may say of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab import Command, Lab

from headrace.config import check_config
from headrace.monitors import read_run, summarise
from headrace.runtime.preflight import preflight

CANARIES = ('data.canaries={type="jsonl",path="canaries.jsonl"}', "alarms.num_canary_rollouts=2")

JUDGE = (
    'verifier.components.style={kind="judge",url="http://127.0.0.1:1/v1",model="m",question="?",'
    'api_key_variable="%s"}'
)


def write_canaries(lab: Lab, *prompts: str) -> None:
    rows = [json.dumps({"prompt": prompt, "answer": "none"}) for prompt in prompts]
    (lab.folder / "canaries.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def with_settings(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.slow
def test_a_policy_that_learns_to_be_paid_for_nothing_stops_at_a_canary_and_may_go_on(
    own_lab: Lab, headrace: Command, tmp_path: Path
) -> None:
    # The reward pays for ones, whatever the task: what learns that passes every task.
    write_canaries(own_lab, "0-0=", "9:9=")
    output = tmp_path / "run"
    told = with_settings(*CANARIES, "alarms.on_alarm=stop", "eval.every=1", "num_steps=40")
    ended = headrace("train", own_lab.recipe, "--output", output, *told)
    assert ended.status == 1, ended
    assert "passed a task that cannot be solved" in ended.err
    assert 'alarms.on_alarm = "stop"' in ended.err
    (alarm,) = summarise(output)["alarms"]
    assert alarm["alarm"] == "canary"
    assert 'id="alarms"' in (output / "report.html").read_text(encoding="utf-8")
    stopped_at = alarm["step"]
    assert stopped_at > 0, "the policy that is not trained yet does not cheat"
    assert read_run(output).steps[-1].step == stopped_at

    goes_on = with_settings(*CANARIES, "eval.every=1", f"num_steps={stopped_at + 2}")
    ended = headrace("train", own_lab.recipe, "--output", output, "--resume", *goes_on)
    assert ended.status == 0, ended
    assert len(read_run(output).steps) == stopped_at + 2


def test_no_canary_is_trained_on_or_held_out(own_lab: Lab) -> None:
    write_canaries(own_lab, "3+3=", "21+21=", "0:0=")
    found = preflight(check_config(own_lab.recipe, CANARIES))
    prepared = found.require()
    assert prepared.canaries is not None
    assert prepared.eval is not None
    assert [prompt.text for prompt in prepared.canaries.prompts] == ["3+3=", "21+21=", "0:0="]
    assert "3+3=" not in {prompt.text for prompt in prepared.train.prompts}
    assert "21+21=" not in {prompt.text for prompt in prepared.eval.prompts}
    assert {prompt.source for prompt in prepared.canaries.prompts} == {"canaries"}
    notes = "\n".join(found.notes)
    assert "data.train: 1 of 14 rows left out" in notes
    assert "data.eval: 1 of 3 rows left out" in notes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ("alarms.drift.component=gold",),
            'alarms.drift.component = "gold": no component of the verifier; allowed: ones',
        ),
        (("alarms.on_alarm=panic",), 'must be one of "warn", "stop"'),
        (("alarms.drift.window=1",), "at least 3"),
        (CANARIES, "canaries.jsonl"),
        (
            (JUDGE % "NO_SUCH_KEY_HERE",),
            'verifier.components.style.api_key_variable = "NO_SUCH_KEY_HERE": the environment',
        ),
    ],
)
def test_check_names_what_cannot_be(
    settings: tuple[str, ...], words: str, lab: Lab, headrace: Command
) -> None:
    ended = headrace("check", lab.recipe, *with_settings(*settings))
    assert ended.status == 2
    assert words in ended.err


def test_a_judge_that_does_not_answer_yet_is_a_note(lab: Lab, headrace: Command) -> None:
    judge = JUDGE.replace(',api_key_variable="%s"', "")
    ended = headrace("check", lab.recipe, "--set", judge)
    assert ended.status == 0
    assert "note: verifier.components.style: http://127.0.0.1:1/v1/models does not" in ended.err


def test_a_key_that_no_header_takes_is_refused_and_not_shown(
    lab: Lab, headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "sk-secret with space")
    ended = headrace("check", lab.recipe, "--set", JUDGE % "KEY_OF_A_TEST")
    assert ended.status == 2
    assert "no HTTP header takes" in ended.err
    assert "sk-secret" not in ended.err
