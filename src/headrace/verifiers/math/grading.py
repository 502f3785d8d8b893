"""The worker's side of `math`: reads both texts again, and decides with balls.

Runs in a process that may be killed: nothing in here has a time limit of its own.
"""

from __future__ import annotations

from headrace.verifiers import frames
from headrace.verifiers.math.algebra import BallDecider, has_value
from headrace.verifiers.math.compare import Rules
from headrace.verifiers.math.judging import UnreadableGold, judge, read_gold
from headrace.verifiers.math.reading import trees
from headrace.verifiers.math.tree import Refused
from headrace.verifiers.math.work import Work


def handle(job: frames.Message) -> frames.Message:
    """Answer whether ``answer`` is right, and by which rule; without one, whether ``gold`` can be.

    The value is None where the expected answer is at fault.
    """
    rules = Rules.from_json(job["rules"])
    try:
        if job["answer"] is None:
            return _checked(job["gold"], rules)
        judgement = judge(job["gold"], job["answer"], rules, BallDecider(rules.tolerance))
    except UnreadableGold as reason:
        return {"status": "ok", "value": None, "detail": str(reason)}
    return {"status": "ok", "value": judgement.right, "detail": judgement.rule}


def _checked(gold: str, rules: Rules) -> frames.Message:
    """Answer whether every number in an expected answer has a value: a logarithm of 0 has none."""
    reading = read_gold(gold, rules)
    work = Work()
    try:
        lacking = any(
            not has_value(tree, work) for item in reading.items for tree in trees(item.value)
        )
    except Refused as reason:
        return {"status": "ok", "value": None, "detail": f"takes {reason}"}
    if lacking:
        return {
            "status": "ok",
            "value": None,
            "detail": "has no value, or one too large to compare",
        }
    return {"status": "ok", "value": True, "detail": "has a value"}
