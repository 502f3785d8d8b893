import asyncio
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import VerifierConfig
from headrace.errors import VerifierFailure
from headrace.types import (
    FinishReason,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Verdict,
)
from headrace.verifiers import build_verifier, needs_answer, verify_completion
from headrace.verifiers.component import Score
from headrace.verifiers.weighted import WeightedComponent, WeightedVerifier


class Scripted:
    """A component that pays the reward its completion spells; ``broken`` and ``none`` are None."""

    async def score(self, prompt: Prompt, completion: str) -> Score:
        del prompt
        match completion:
            case "broken":
                return Score(
                    outcome=Outcome.RUNTIME, reward=None, detail="boom", traceback="File x line 3"
                )
            case "none":
                return Score(outcome=Outcome.ABSTAIN, reward=None)
            case "infra":
                return Score(outcome=Outcome.INFRA, reward=None)
            case _:
                return Score(outcome=Outcome.PASS, reward=float(completion))

    async def close(self) -> None:
        pass


class Always(Scripted):
    """Pays the same to all."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def score(self, prompt: Prompt, completion: str) -> Score:
        del completion
        return await super().score(prompt, self._text)


def group(*texts: str, finish_reason: FinishReason = "stop") -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            rollout_index=index,
            completion_ids=(),
            loss_mask=(),
            generator_logprobs=(),
            version_spans=(),
            finish_reason=finish_reason,
            text=text,
        )
        for index, text in enumerate(texts)
    )
    prompt = Prompt(prompt_id="p", source="s", text="t", token_ids=(1,), answer="5")
    return RolloutGroup(group_id="0/p", prompt=prompt, rollouts=rollouts, sampling=SamplingParams())


def verifier(*parts: tuple[Scripted, float], window: int = 1000) -> WeightedVerifier:
    return WeightedVerifier(
        {
            f"part{index}": WeightedComponent(component=part, weight=weight, require_stop=True)
            for index, (part, weight) in enumerate(parts)
        },
        pass_threshold=1.0,
        max_failed_share=0.5,
        window=window,
    )


def score(judge: WeightedVerifier, scored: RolloutGroup) -> Sequence[Verdict]:
    return asyncio.run(judge.score(scored))


def test_the_reward_is_the_weighted_sum_and_every_component_is_kept() -> None:
    (verdict,) = score(verifier((Scripted(), 2.0), (Always("0.5"), -1.0)), group("1"))
    assert verdict.reward == 1.5
    assert verdict.components == {"part0": 1.0, "part1": 0.5}
    assert verdict.outcome is Outcome.PASS
    assert verdict.verifier == "part0+part1"


def test_a_sum_that_rounds_below_the_threshold_still_reaches_it() -> None:
    parts = [(Always("1"), weight) for weight in (0.7, 0.2, 0.1)]
    assert score(verifier(*parts), group("1"))[0].outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("1", Outcome.PASS),
        ("0.9999999999", Outcome.PASS),
        ("0.99999999", Outcome.WRONG),
        ("1.5", Outcome.PASS),
        ("-1", Outcome.WRONG),
    ],
)
def test_the_outcome_alone_says_whether_the_threshold_was_reached(
    text: str, outcome: Outcome
) -> None:
    assert score(verifier((Scripted(), 1.0)), group(text))[0].outcome is outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [("broken", Outcome.RUNTIME), ("none", Outcome.ABSTAIN), ("infra", Outcome.INFRA)],
)
def test_a_component_without_a_reward_leaves_the_whole_rollout_unscored(
    text: str, outcome: Outcome
) -> None:
    (verdict,) = score(verifier((Always("1"), 1.0), (Scripted(), 1.0)), group(text))
    assert verdict.reward is None
    assert verdict.outcome is outcome
    assert verdict.components == {"part0": 1.0, "part1": None}


@given(st.lists(st.sampled_from(["1", "0", "0.25", "none", "broken"]), min_size=1, max_size=16))
def test_only_the_rollout_that_failed_is_left_out(texts: list[str]) -> None:
    verdicts = score(verifier((Scripted(), 1.0)), group(*texts))
    expected = [None if text in {"none", "broken"} else float(text) for text in texts]
    assert [verdict.reward for verdict in verdicts] == expected


def test_a_completion_cut_off_by_the_limit_is_wrong_and_says_so() -> None:
    (verdict,) = score(verifier((Scripted(), 1.0)), group("1", finish_reason="length"))
    assert verdict.reward == 0.0
    assert "cut off" in verdict.detail


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_rollout_that_did_not_come_to_its_end_is_not_scored(reason: FinishReason) -> None:
    (verdict,) = score(verifier((Scripted(), 1.0)), group("1", finish_reason=reason))
    assert (verdict.outcome, verdict.reward) == (Outcome.INFRA, None)


def test_a_batch_of_failures_stops_the_run_with_the_first_traceback() -> None:
    judge = verifier((Scripted(), 1.0), window=8)
    with pytest.raises(VerifierFailure, match=r"(?s)8 of the last 8.*boom.*File x line 3"):
        score(judge, group(*["broken"] * 8))


def test_some_failures_and_any_number_of_abstentions_do_not_stop_the_run() -> None:
    judge = verifier((Scripted(), 1.0), window=8)
    score(judge, group(*["broken"] * 4, *["1"] * 4))
    score(judge, group(*["none"] * 16))


def test_a_sum_out_of_range_is_reported_instead_of_raised() -> None:
    (verdict,) = score(verifier((Scripted(), 1e8)), group("1000"))
    assert verdict.reward is None
    assert "lower the weights" in verdict.detail


def config(**components: dict[str, object]) -> VerifierConfig:
    return VerifierConfig.model_validate({"components": components})


def test_one_completion_can_be_verified_by_itself() -> None:
    numeric = config(sum={"kind": "numeric"})
    verdict = asyncio.run(
        verify_completion(numeric, prompt="10 + 5", answer="15", completion="10 + 5 = 15.")
    )
    assert verdict.reward == 1.0
    assert verdict.detail == "sum: '15' against '15'"


def test_a_verifier_built_from_config_scores_with_each_kind() -> None:
    both = config(
        text={"kind": "exact", "weight": 0.25, "extract": "after_last_marker"},
        value={"kind": "numeric", "weight": 0.75},
    )
    judge = build_verifier(both)
    rewards = [verdict.reward for verdict in score(judge, group("so:5", "so:5.0", "so:6"))]
    asyncio.run(judge.close())
    assert rewards == [1.0, 0.75, 0.0]
    assert math.fsum(reward or 0.0 for reward in rewards) == 1.75


def test_only_a_function_works_without_an_expected_answer() -> None:
    assert needs_answer(config(a={"kind": "exact"}))
    assert not needs_answer(config(a={"kind": "function", "path": "m:f"}))


def test_a_rollout_that_is_paid_too_little_says_how_it_failed() -> None:
    class TimedOut(Scripted):
        async def score(self, prompt: Prompt, completion: str) -> Score:
            del prompt, completion
            return Score(outcome=Outcome.TIMEOUT_CPU, reward=0.0)

    verdicts = score(verifier((Always("0"), 1.0), (TimedOut(), 1.0)), group("x"))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.TIMEOUT_CPU]
    assert verdicts[0].reward == 0.0
