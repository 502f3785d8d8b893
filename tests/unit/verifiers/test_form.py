import asyncio
import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import FormatConfig, LanguageConfig, LengthConfig, parse_config
from headrace.errors import ConfigError
from headrace.types import Outcome, Prompt, Rollout, VersionSpan
from headrace.verifiers import format as format_module
from headrace.verifiers.component import Score
from headrace.verifiers.format import FormatComponent
from headrace.verifiers.language import LanguageComponent
from headrace.verifiers.length import LengthComponent

PROMPT = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,))


def form(text: str, **options: object) -> Score:
    config = FormatConfig.model_validate({"kind": "format", **options})
    return asyncio.run(FormatComponent(config).score(PROMPT, text))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a < b > c</think><answer><b>b</b></answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("so<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>so", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_stand_once_in_order_with_nothing_around_them(text: str, reward: float) -> None:
    assert form(text, tags=("think", "answer")).reward == reward


def test_a_fault_of_the_form_is_named() -> None:
    assert form("<think>a</think>", tags=("think", "answer")).detail == (
        "<answer> stands 0 times and not once"
    )


def test_text_around_the_tags_may_be_allowed() -> None:
    text = "so <think>a</think> then <answer>b</answer> done"
    assert form(text, tags=("think", "answer"), outside="anything").reward == 1.0


@pytest.mark.parametrize(
    "text",
    ["<answer>b</answer> <think>a</think>", "<think>a <answer>b</answer> c</think>"],
)
def test_tags_keep_their_order_whatever_may_stand_around_them(text: str) -> None:
    assert form(text, tags=("think", "answer"), outside="anything").reward == 0.0


def test_a_tag_that_the_prompt_has_opened_counts() -> None:
    options = {"tags": ("think", "answer"), "prefix": "<think>"}
    assert form("a</think><answer>b</answer>", **options).reward == 1.0
    assert form("<think>a</think><answer>b</answer>", **options).reward == 0.0


def test_a_pattern_must_match_all_of_it() -> None:
    assert form("Answer: 5\n", pattern=r".*Answer: \d+\s*").reward == 1.0
    assert form("line\nAnswer: 5", pattern=r".*Answer: \d+\s*").reward == 1.0
    assert form("Answer: 5 or 6", pattern=r".*Answer: \d+\s*").reward == 0.0


def test_a_pattern_that_never_ends_pays_nothing_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(format_module, "PATTERN_SECONDS", 0.2)
    config = FormatConfig(kind="format", pattern=r"(a|aa)+(b|bb)*(a|aa)+$")
    component = FormatComponent(config)

    matched_on: list[int] = []
    pattern = component._pattern

    class Noted:
        """Remembers the thread that waits for the match."""

        def fullmatch(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - regex's
            matched_on.append(threading.get_ident())
            assert options["concurrent"], "or it would hold every thread up"
            return pattern.fullmatch(*arguments, **options)

    monkeypatch.setattr(component, "_pattern", Noted())
    score = asyncio.run(component.score(PROMPT, "a" * 60 + "c"))
    assert (score.outcome, score.reward) == (Outcome.TIMEOUT_WALL, 0.0)
    (thread,) = matched_on
    assert thread != threading.get_ident()


def refused(**component: object) -> str:
    recipe = {
        "num_steps": 1,
        "model": {"path": "nano"},
        "data": {"train": {"type": "jsonl", "path": "train.jsonl"}},
        "verifier": {"components": {"form": component, "answer": {"kind": "exact"}}},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(recipe)
    (problem,) = caught.value.problems
    return problem


def test_a_format_that_asks_for_nothing_or_cannot_be_is_refused() -> None:
    assert "give at least one" in refused(kind="format")
    assert "names one twice" in refused(kind="format", tags=["think", "think"])
    assert "no regular expression" in refused(kind="format", pattern="(a")
    assert "must be text that matches" in refused(kind="format", tags=["<think>"])
    assert "must lie below limit" in refused(kind="length", start=8, limit=8)
    assert '"latin"' in refused(kind="language", scripts=["elvish"])


def lost(length: int, **options: object) -> float:
    config = LengthConfig.model_validate({"kind": "length", "start": 10, "limit": 20, **options})
    rollout = Rollout(
        rollout_index=0,
        completion_ids=(1,) * length,
        loss_mask=(True,) * length,
        generator_logprobs=(0.0,) * length,
        version_spans=(VersionSpan(policy_version=0, start=0, end=length),),
        finish_reason="stop",
        text="xy" * length,
    )
    score = asyncio.run(LengthComponent(config).score_rollout(PROMPT, rollout))
    assert score.reward is not None
    return score.reward


def test_length_costs_nothing_up_to_the_start_and_everything_from_the_limit_on() -> None:
    assert [lost(n) for n in (1, 10, 15, 18, 20, 30)] == [0.0, 0.0, -0.5, -0.8, -1.0, -1.0]
    assert math.copysign(1.0, lost(1)) == 1.0


def test_the_wave_agrees_with_the_line_at_both_ends_and_in_the_middle() -> None:
    assert [lost(n, shape="cosine") for n in (10, 15, 20)] == pytest.approx([0.0, -0.5, -1.0])
    assert lost(12, shape="cosine") > lost(12)
    assert lost(18, shape="cosine") < lost(18)


def test_characters_are_counted_where_they_are_asked_for() -> None:
    assert lost(8, unit="characters") == pytest.approx(-0.6)
    assert lost(8) == 0.0


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["linear", "cosine"]))
def test_longer_never_costs_less(one: int, other: int, shape: str) -> None:
    short, long = sorted((one, other))
    assert -1.0 <= lost(long, shape=shape) <= lost(short, shape=shape) <= 0.0


def foreign(text: str, *scripts: str, tolerance: float = 0.0) -> float:
    config = LanguageConfig.model_validate(
        {"kind": "language", "scripts": scripts, "tolerance": tolerance}
    )
    score = asyncio.run(LanguageComponent(config).score(PROMPT, text))
    assert score.reward is not None
    return score.reward


def test_letters_of_other_scripts_are_lost_in_proportion() -> None:
    assert foreign("abcd", "latin") == 0.0
    assert foreign("abcд", "latin") == -0.25
    assert foreign("привет", "latin") == -1.0
    assert foreign("привет", "latin", "cyrillic") == 0.0
    assert foreign("我们 ok", "han") == -0.5
    assert foreign("ありがとうー", "hiragana") == 0.0
    assert foreign("é ñ Å ß", "latin") == 0.0


def test_numbers_and_symbols_belong_to_every_script() -> None:
    assert foreign("12 + 3 = 15, √2 ≈ 1.41 → ∞ 😀", "latin") == 0.0
    assert foreign("", "latin") == 0.0


def test_a_few_foreign_letters_are_tolerated() -> None:
    assert foreign("a" * 99 + "π", "latin", tolerance=0.02) == 0.0
    assert foreign("a" * 9 + "π", "latin", tolerance=0.02) == pytest.approx(-0.1)


def test_a_long_text_is_read_in_one_pass() -> None:
    start = time.monotonic()
    assert foreign("a\u0431" * 200_000, "latin") == -0.5
    assert time.monotonic() - start < 90.0  # a hang guard
