"""`[verifier.components.NAME]` with ``kind = "code"``: programs that tests decide about."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from headrace.config.component import ComponentSection

CodeExtraction = Literal["last_block", "first_block", "only_block", "whole"]
"""Which part of a completion is the program; docs/VERIFIERS.md has each rule with examples."""

OutputComparison = Literal["lines", "tokens", "exact"]
"""How standard output is compared."""

Credit = Literal["all", "share", "visible_then_heldout"]
"""What a program is paid that passes some of its tests."""

RowFormat = Literal["auto", "tests", "livecodebench", "humaneval", "mbpp", "apps"]
"""How a row spells its tests; docs/VERIFIERS.md has the columns of each."""


class CodeConfig(ComponentSection):
    """Pays for a program that passes the row's tests; it runs in the sandbox, one test a run.

    The expected values stay outside of it. Rows bring their tests in columns of their own.
    """

    kind: Literal["code"]
    """Tells the kind of component."""
    format: RowFormat = "auto"
    """How rows spell their tests; ``auto`` tells by their columns."""
    tests_column: str | None = None
    """Column with the tests, where it is not named as its format names it."""
    language: str = Field(default="python", min_length=1)
    """What the program is written in; function tests need Python."""
    extract: CodeExtraction = "last_block"
    """Which part of the completion is the program: a block between fences, or ``whole``."""
    unclosed_is_code: bool = False
    """Let a fence that never closes reach to the end; else such a completion has no program."""
    credit: Credit = "all"
    """``all``: 1 when every test passes, else 0. ``share``: the share of held-out tests that pass.
    ``visible_then_heldout``: the same, and 0 unless every visible test passes."""
    heldout_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of a row's tests that ``{tests}`` in ``data.user_template`` does not show, at least
    one; only for rows that do not say themselves which of theirs are private."""
    max_tests: int | None = Field(default=None, ge=1)
    """Grade by so many of a row's held-out tests, always the same ones; null runs all."""
    stop_when_settled: bool = True
    """Run no further test once the reward is certain; false runs all, for the detail."""
    tests_at_once: int = Field(default=2, ge=1)
    """Tests of one rollout that may run side by side."""
    unreadable_asserts: Literal["refuse", "drop"] = "refuse"
    """An assert that cannot be turned into data: its row is bad, or it alone is left out and
    counted; a row that keeps none is bad either way."""
    stdout: OutputComparison = "lines"
    """``lines``: without white space at the ends of lines; ``tokens``: without any; ``exact``."""
    absolute_tolerance: float = Field(default=0.0, ge=0.0)
    """Largest difference of two numbers that still counts as equal, returned or written."""
    relative_tolerance: float = Field(default=0.0, ge=0.0)
    """The same, as a share of the expected number; the larger of the two counts."""
    tuple_is_list: Literal["from_json", "always", "never"] = "from_json"
    """Whether a returned tuple may stand for a list: where the expected value came from JSON, which
    has no tuples; or always; or never."""
    nan_is_nan: bool = False
    """Count NaN as equal to NaN."""
    cpu_seconds: float = Field(default=4.0, gt=0.0, le=600.0)
    """Processor time of one test; all processes of the program together."""
    wall_seconds: float = Field(default=12.0, gt=0.0, le=3600.0)
    """Time of one test on the clock, a looser guard against sleeping."""
    memory_mib: int = Field(default=512, ge=32)
    """Memory of one test."""
    output_kib: int = Field(default=1024, ge=1)
    """Standard output, standard error and a returned value may have so much, each."""

    @model_validator(mode="after")
    def _column_of_a_format(self) -> Self:
        if self.tests_column is not None and self.format == "auto":
            msg = (
                f"tests_column = {self.tests_column!r}: say how it spells tests, with format = "
                '"tests", "livecodebench", "humaneval", "mbpp" or "apps"'
            )
            raise ValueError(msg)
        return self
