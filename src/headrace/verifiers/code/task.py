"""One row's tests as data: what goes into the sandbox, and what must come out of it.

Owns: a test is an input and an expectation that are apart, so that the one can travel without the
other. Nothing here was ever executed.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, by exact type."""

MAX_VALUE_BYTES = 1 << 26
"""Of the arguments of one call, and of what it is expected to return, when encoded."""
MAX_TESTS = 100_000
"""Of one row: beyond it something was read wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a test does with a returned value before it compares: ``sorted(f(x))``."""

    name: str
    arguments: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a number may be from the expected one: the larger of the two counts."""

    absolute: float = 0.0
    relative: float = 0.0
    """As a share of the expected number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a row's own solution returns is expected; it runs in an execution of its own."""

    source: str
    function: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTest:
    """A program reads standard input and must write this to standard output."""

    stdin: str
    stdout: str
    """Expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A function is called and must return this."""

    function: str
    arguments: tuple[Value, ...]
    expected: Value
    """Or a `Reference`, until it has been run."""
    views: tuple[View, ...] = ()
    """Applied to what was returned, the first one first."""
    tolerance: Tolerance | None = None
    """Of this test alone; None takes the component's."""
    from_json: bool = False
    """Expected value and arguments came from JSON, which has no tuples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """One test and whether the policy may know it."""

    test_id: str
    """Unique within its task: its place in the row."""
    check: OutputTest | CallTest
    visible: bool
    """Shown to the policy, or meant to be; the others are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTask:
    """The tests of one row."""

    tests: tuple[CodeTest, ...]
    """One of them at least is held out."""
    prelude: str = ""
    """Put before the policy's code: imports that the task promises."""
    header: str = ""
    """The beginning of the function to write, as HumanEval's prompts are: code that does not define
    ``entry_point`` continues it, other code comes after it."""
    entry_point: str | None = None
    num_dropped: int = 0
    """Asserts that could not be turned into data, where the recipe allows to drop them."""

    def __post_init__(self) -> None:
        if not self.heldout:
            msg = "a task without a test that is held out would pay for what the prompt shows"
            raise ValueError(msg)

    @property
    def heldout(self) -> tuple[CodeTest, ...]:
        """The tests that the policy does not know; at least one."""
        return tuple(test for test in self.tests if not test.visible)

    @property
    def visible(self) -> tuple[CodeTest, ...]:
        """The tests that the policy may know."""
        return tuple(test for test in self.tests if test.visible)


def numbered(
    checks: Sequence[OutputTest | CallTest], *, visible: bool, prefix: str = ""
) -> tuple[CodeTest, ...]:
    """Return ``checks`` as tests with ids 1, 2, ... behind ``prefix``."""
    return tuple(
        CodeTest(test_id=f"{prefix}{number}", check=check, visible=visible)
        for number, check in enumerate(checks, start=1)
    )


def hold_out(tests: Sequence[CodeTest], share: float) -> tuple[CodeTest, ...]:
    """Return ``tests`` with ``share`` of them held out, at least one, and the others visible.

    Which ones depends on the tests alone: the same on every machine, and in every run.
    """
    num_held = min(len(tests), max(1, round(share * len(tests))))
    held = set(random.Random(seed_of(tests)).sample(range(len(tests)), num_held))  # noqa: S311 - no secret: the policy cannot ask for it
    return tuple(replace(test, visible=place not in held) for place, test in enumerate(tests))


def shuffled(task: CodeTask, max_tests: int | None) -> tuple[CodeTest, ...]:
    """Return the tests in the order they are run: the visible ones first, each part shuffled.

    At most ``max_tests`` of those held out.
    """
    draw = random.Random(seed_of(task.tests))  # noqa: S311 - as above
    heldout = draw.sample(task.heldout, len(task.heldout))[:max_tests]
    return (*draw.sample(task.visible, len(task.visible)), *heldout)


def literal(value: Value) -> str:  # noqa: PLR0911 - one for each type
    """Return ``value`` as Python writes it, sets in an order that is the same in every process."""
    match value:
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case tuple():
            return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
        case set() if value:
            return f"{{{', '.join(sorted(map(literal, value)))}}}"
        case frozenset() if value:
            return f"frozenset({{{', '.join(sorted(map(literal, value)))}}})"
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case _:
            return repr(value)


def seed_of(tests: Sequence[CodeTest]) -> int:
    """Return a seed that depends on the inputs of ``tests``."""
    digest = hashlib.blake2b(digest_size=8)
    for test in tests:
        check = test.check
        given = check.stdin if isinstance(check, OutputTest) else literal(check.arguments)
        digest.update(f"{test.test_id}\x1f{given}\x1e".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big")
