"""What a program is paid where some of its tests could not be run."""

import pytest

from headrace.config import CodeConfig
from headrace.types import Outcome
from headrace.verifiers.code.credit import score_of
from headrace.verifiers.code.judging import TestResult
from headrace.verifiers.code.task import CodeTest, OutputTest

PASS, WRONG, INFRA = Outcome.PASS, Outcome.WRONG, Outcome.INFRA


def result(number: int, outcome: Outcome) -> TestResult:
    """Return what became of a test, the first of which is visible."""
    check = OutputTest(stdin=b"", stdout=b"")
    test = CodeTest(test_id=str(number), check=check, visible=number == 0)
    return TestResult(
        test=test, outcome=outcome, detail="", tier="none", cpu_seconds=0.0, wall_seconds=0.0
    )


@pytest.mark.parametrize(
    ("credit", "outcomes", "reward"),
    [
        ("all", (PASS, INFRA, PASS), None),
        ("all", (PASS, INFRA, WRONG), 0.0),
        ("all", (WRONG, INFRA, PASS), 0.0),
        ("share", (PASS, INFRA, WRONG), None),
        ("visible_then_heldout", (WRONG, INFRA, PASS), 0.0),
        ("visible_then_heldout", (PASS, INFRA, WRONG), None),
        ("all", (PASS, PASS, PASS), 1.0),
    ],
)
def test_what_a_program_has_lost_no_failure_of_ours_gives_back(
    credit: str, outcomes: tuple[Outcome, ...], reward: float | None
) -> None:
    config = CodeConfig.model_validate({"kind": "code", "credit": credit})
    results = [result(number, outcome) for number, outcome in enumerate(outcomes)]
    score = score_of(results, [one.test for one in results], config)
    assert score.reward == reward
    assert (score.outcome is INFRA) == (reward is None)
