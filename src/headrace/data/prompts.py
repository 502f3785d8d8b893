"""Every row of a source: a `Prompt`, or counted with the reason, and all reasons said at once.

Invariant: prompts + skipped + excluded + repeated = rows, and no two prompts share an id. A row
is never repaired. How one row becomes a prompt is in `headrace.data.building`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.config import DataConfig, SourceConfig
from headrace.data.building import PromptBuilder, PromptTokenizer, RowTasks, Rules
from headrace.data.faults import FaultList, RowError
from headrace.data.rows import BrokenRow, Row
from headrace.data.sources import OpenSource, open_source
from headrace.errors import DataError
from headrace.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every row: prompts + skipped + excluded + repeated = rows."""

    prompts: tuple[Prompt, ...]
    """In the order of the source."""
    problems: tuple[str, ...]
    """One line for each kind of fault, with the rows that have it; empty if all is well."""
    num_rows: int
    """Rows read."""
    num_skipped: int
    """Rows with a fault."""
    num_excluded: int
    """Rows without a fault whose text is in ``exclude``."""
    num_repeated: int
    """Rows that a procedural source had already made; in a file a repeated row is a fault."""


def load_prompts(
    data: DataConfig,
    source: SourceConfig,
    tokenizer: PromptTokenizer,
    *,
    source_name: str,
    needs_answer: bool,
    check_answer: Callable[[str, Mapping[str, object]], str | None] | None,
    tasks: RowTasks | None = None,
    max_context: int,
    max_tokens: int,
    exclude: Collection[str] = frozenset(),
) -> LoadReport:
    """Read every row of ``source``, one of the two in ``data``.

    ``needs_answer``: a verifier compares with the answer. ``check_answer`` returns what is wrong
    with an answer, given the columns of its row, or None. ``tasks`` reads the tests of rows.
    ``max_context`` and ``max_tokens`` (of a completion) are in tokens. ``exclude`` holds the
    `Prompt.text` of prompts used elsewhere: what makes held-out data so.

    Raises DataError with every problem: with ``on_bad_row = "stop"`` if any row has a fault,
    always if no row is usable or a setting does not fit; ConfigError for a source that cannot be.
    """
    rules = Rules(
        data=data,
        tokenizer=tokenizer,
        source_name=source_name,
        needs_answer=needs_answer,
        check_answer=check_answer,
        tasks=tasks,
        max_context=max_context,
        max_tokens=max_tokens,
    )
    opened = open_source(source)
    load = _Load(rules, opened, exclude)
    for row in opened.rows:
        load.add(row)
    report = load.report()
    settings = _setting_problems(rules, opened)
    if settings or not report.prompts or (report.problems and data.on_bad_row == "stop"):
        raise DataError(*settings, *report.problems, *_nothing_left(report, opened))
    return report


def _setting_problems(rules: Rules, source: OpenSource) -> tuple[str, ...]:
    problems = []
    if rules.lacks_template:
        problems.append(
            'data.template = "chat": the tokenizer of this model has no chat template; '
            'set data.template = "raw" or take a model that has one'
        )
    if rules.needs_answer and source.answer_column is None:
        problems.append(
            f"data.{rules.source_name}.answer_column = null: the verifier compares with an "
            "expected answer; name the column that holds it"
        )
    if rules.shows_tests and rules.tasks is None:
        problems.append(
            "data.user_template has {tests}, and no component of the verifier runs tests; add one "
            'of kind = "code" or leave {tests} out'
        )
    return tuple(problems)


def _nothing_left(report: LoadReport, source: OpenSource) -> tuple[str, ...]:
    if report.prompts:
        return ()
    line = (
        f"{source.origin}: no usable row; {report.num_rows} read, {report.num_skipped} with a "
        f"fault, {report.num_excluded} also in the other source"
    )
    if source.is_procedural and report.num_excluded:
        line += "; row i is made from seed + i, so take seeds at least size apart"
    return (line,)


class _Load:
    """One pass over a source."""

    def __init__(self, rules: Rules, source: OpenSource, exclude: Collection[str]) -> None:
        self._source = source
        self._builder = PromptBuilder(rules, source)
        self._exclude = frozenset(exclude)
        self._faults = FaultList(origin=source.origin, unit=source.unit)
        self._prompts: list[Prompt] = []
        self._first_seen: dict[str, int] = {}
        """Prompt id -> number of the row that has it."""
        self._num_rows = self._num_skipped = self._num_excluded = self._num_repeated = 0

    def add(self, row: Row | BrokenRow) -> None:
        """Turn one row into a prompt, or count it under what kept it from being one."""
        self._num_rows += 1
        if isinstance(row, BrokenRow):
            self._skip(row.number, [row.fault])
            return
        prompt, faults = self._builder.build(row)
        if prompt is None:
            self._skip(row.number, faults)
            return
        first = self._first_seen.setdefault(prompt.prompt_id, row.number)
        if first != row.number and self._source.is_procedural:
            self._num_repeated += 1
        elif first != row.number:
            self._skip(row.number, [self._repetition(prompt, first)])
        elif prompt.text in self._exclude:
            self._num_excluded += 1
        else:
            self._prompts.append(prompt)

    def report(self) -> LoadReport:
        return LoadReport(
            prompts=tuple(self._prompts),
            problems=self._faults.lines(),
            num_rows=self._num_rows,
            num_skipped=self._num_skipped,
            num_excluded=self._num_excluded,
            num_repeated=self._num_repeated,
        )

    def _skip(self, number: int, faults: Sequence[RowError]) -> None:
        self._num_skipped += 1
        for fault in faults:
            self._faults.add(number, fault)

    def _repetition(self, prompt: Prompt, first: int) -> RowError:
        earlier = f"{self._source.unit} {first}"
        if self._source.id_column is None:
            reason = "repeats the prompt and answer of an earlier row"
            return RowError(reason, f"as {earlier}")
        reason = f'column "{self._source.id_column}" repeats the id of an earlier row'
        return RowError(reason, f"{prompt.prompt_id!r}, as {earlier}")
