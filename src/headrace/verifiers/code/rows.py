"""What the code components of a verifier make of rows while prompts are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.config import CodeConfig
from headrace.verifiers.code.formats import read_task
from headrace.verifiers.code.published import UnreadableRowError
from headrace.verifiers.code.task import CallTest, CodeTest, OutputTest, Reference, literal


class RowTasks:
    """Reads each row for every code component, so that a bad one is known before the run."""

    def __init__(self, configs: Mapping[str, CodeConfig]) -> None:
        assert configs, "without a code component no row has tests"
        self._configs = dict(configs)
        self._num_dropped = 0
        self._num_rows_with_dropped = 0

    def problem(self, row: Mapping[str, object]) -> str | None:
        """Return why ``row`` cannot be graded, or None."""
        for name, config in self._configs.items():
            try:
                task = read_task(row, config)
            except UnreadableRowError as error:
                return f"{name}: {error}"
            self._num_dropped += task.num_dropped
            self._num_rows_with_dropped += task.num_dropped > 0
        return None

    def shown(self, row: Mapping[str, object]) -> str:
        """Return the visible tests of the first code component as text for the prompt.

        ``row`` must be one without a problem.
        """
        config = next(iter(self._configs.values()))
        return written_out(read_task(row, config).visible)

    def notes(self) -> tuple[str, ...]:
        """Return what ``headrace check`` should say: how many asserts were dropped."""
        if not self._num_dropped:
            return ()
        note = (
            f"{self._num_dropped} asserts of {self._num_rows_with_dropped} rows could not be "
            'turned into data and were left out (unreadable_asserts = "drop")'
        )
        return (note,)


def written_out(tests: Sequence[CodeTest]) -> str:
    """Return ``tests`` as a policy may read them: asserts, or inputs and outputs."""
    return "\n".join(_written(test.check) for test in tests if _can_be_shown(test.check))


def _can_be_shown(check: OutputTest | CallTest) -> bool:
    """Whether what is expected is known before a reference has been run."""
    return isinstance(check, OutputTest) or not isinstance(check.expected, Reference)


def _written(check: OutputTest | CallTest) -> str:
    if isinstance(check, OutputTest):
        return f"Input:\n{check.stdin.rstrip()}\nOutput:\n{check.stdout.rstrip()}\n"
    call = f"{check.function}({', '.join(map(literal, check.arguments))})"
    for view in check.views:
        call = f"{view.name}({', '.join([call, *map(literal, view.arguments)])})"
    if check.tolerance is not None and check.tolerance.absolute:
        return f"assert abs({call} - {literal(check.expected)}) < {check.tolerance.absolute:g}"
    return f"assert {call} == {literal(check.expected)}"
