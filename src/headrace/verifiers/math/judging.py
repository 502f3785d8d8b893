"""From two texts to a judgement: read both, compare them, and say which rule decided.

The one path that the parent process, the grading processes and ``--explain`` share.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.verifiers.math.compare import Comparison, Rules, shown
from headrace.verifiers.math.deciding import Decider, ExactDecider, NeedsAlgebra
from headrace.verifiers.math.finality import left_to_do, says_the_task
from headrace.verifiers.math.kinds import as_set, type_problem
from headrace.verifiers.math.measuring import with_base
from headrace.verifiers.math.reading import Reading, read
from headrace.verifiers.math.regions import region_of
from headrace.verifiers.math.rewriting import rewritten
from headrace.verifiers.math.spelling import letter_of, unwrap
from headrace.verifiers.math.tree import Refused, Symbol, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What became of one answer."""

    right: bool
    rule: str
    """What decided, in words."""


class UnreadableGold(Exception):
    """The expected answer cannot be read, or is not of its declared type; the message says why."""


def read_gold(text: str, rules: Rules) -> Reading:
    """Return an expected answer as it is read. Raises UnreadableGold."""
    try:
        gold = read(text, rules.answer_type)
    except Refused as reason:
        msg = f"is refused: {reason}"
        raise UnreadableGold(msg) from reason
    except Unreadable as reason:
        msg = f"cannot be read as {_wanted(rules)}: {reason}"
        raise UnreadableGold(msg) from reason
    problem = type_problem(gold, rules.answer_type) or _region_problem(gold, rules)
    if problem is not None:
        msg = f"is not of its answer type: {problem}"
        raise UnreadableGold(msg)
    return gold


def _region_problem(gold: Reading, rules: Rules) -> str | None:
    if rules.answer_type != "interval":
        return None
    try:
        for item in gold.items:
            region_of(as_set(item.value))
    except Unreadable as reason:
        return str(reason)
    return None


def judge(gold_text: str, answer_text: str, rules: Rules, decide: Decider) -> Judgement:
    """Return whether an answer is right. Raises UnreadableGold, and NeedsAlgebra as ``decide``.

    An answer that this program has a fault with is wrong: a policy must not learn that breaking
    the grader keeps a rollout from counting.
    """
    try:
        return judged(gold_text, answer_text, rules, decide)
    except (UnreadableGold, NeedsAlgebra, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - see the docstring
        return Judgement(right=False, rule=f"cannot be compared: {type(error).__name__}")


def judged(gold_text: str, answer_text: str, rules: Rules, decide: Decider) -> Judgement:
    """Do the same, and raise whatever a fault of this program raises."""
    gold = read_gold(gold_text, rules)
    try:
        answer = _answer(gold, answer_text, rules)
    except Refused as reason:
        return Judgement(right=False, rule=f"refused: {reason}")
    except Unreadable as reason:
        if _is_same_choice(gold, answer_text):
            return Judgement(right=True, rule="the same choice")
        return Judgement(right=False, rule=f"unreadable: {reason}")
    undone = left_to_do(answer) if rules.form == "final" else None
    if undone is not None and left_to_do(gold) is None:
        return Judgement(right=False, rule=f"not a final answer: {undone}")
    finding = Comparison(rules, decide).compare(gold, answer)
    if not finding.right and _is_same_choice(gold, answer_text):
        return Judgement(right=True, rule="the same choice")
    return Judgement(right=finding.right, rule=finding.rule)


def repeats_task(task: str, gold_text: str, answer_text: str, rules: Rules) -> bool:
    """Whether a right answer is but the task again, which the expected one is not."""
    gold = read_gold(gold_text, rules)
    try:
        answer = _answer(gold, answer_text, rules)
    except Unreadable:
        # Right as a choice, of which nothing is left to do.
        return False
    return left_to_do(gold) is None and says_the_task(task, answer)


def explain(gold_text: str, answer_text: str, rules: Rules) -> list[str]:
    """Return how a judgement comes about, a line a step. Raises UnreadableGold."""
    gold = read_gold(gold_text, rules)
    within = f"{rules.tolerance.absolute} absolute and {rules.tolerance.relative} relative"
    declared = (
        f"answer type {rules.answer_type}, units {rules.units}, form {rules.form}, within {within}"
    )
    lines = [declared, *_steps("expected", gold_text, gold)]
    try:
        lines += _steps("answer", answer_text, _answer(gold, answer_text, rules))
        judgement = judge(gold_text, answer_text, rules, ExactDecider(rules.tolerance))
    except Unreadable as reason:
        return [*lines, f"answer: {answer_text!r} cannot be read: {reason}"]
    except NeedsAlgebra:
        return [*lines, "fractions cannot tell: a grading process decides by balls"]
    return [*lines, f"decided without algebra: {judgement.rule}: {_word(judgement)}"]


def _steps(who: str, given: str, reading: Reading) -> list[str]:
    lines = [f"{who}: {given!r}"]
    if reading.text != given:
        lines.append(f"{who} without markup: {reading.text!r}")
    if reading.unified not in {"", reading.text}:
        lines.append(f"{who} with one spelling for each sign: {reading.unified!r}")
    return [*lines, f"{who} is read as: {shown(reading)}"]


def _word(judgement: Judgement) -> str:
    return "right" if judgement.right else "wrong"


def _answer(gold: Reading, text: str, rules: Rules) -> Reading:
    unit = next((item.unit for item in gold.items if item.unit), "")
    if unit.startswith("base_"):
        text = with_base(unwrap(rewritten(text)), unit)
    return read(text, rules.answer_type, has_unit=unit != "")


def _is_same_choice(gold: Reading, answer_text: str) -> bool:
    """Whether an expected letter is chosen: ``(B) 12``, "Option B"; here its case counts."""
    letter = _letter_of(gold)
    return letter is not None and letter_of(unwrap(rewritten(answer_text))) == letter


def _letter_of(gold: Reading) -> str | None:
    """Return the letter of an expected answer that may be a choice."""
    value = gold.only.value if gold.only else None
    is_letter = isinstance(value, Symbol) and len(value.name) == 1 and value.name.isupper()
    return value.name if is_letter and isinstance(value, Symbol) else None


def _wanted(rules: Rules) -> str:
    return "mathematics" if rules.answer_type == "auto" else rules.answer_type
