"""RolloutMonitor: rollouts of steps and evaluations, and the record of steps that can be replayed.

Files are written in the order of the steps, beside the run, by a thread of their own. Owns: a
step's record comes after its rollout file is complete, and no record follows a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from headrace.monitors.background import BackgroundWriter
from headrace.monitors.rollouts import write_rollouts
from headrace.monitors.run_directory import ROLLOUTS_FOLDER, rollout_file
from headrace.monitors.step_records import Facts, RecordedStep, Weights, append_record
from headrace.types import EvaluationRecord, RunEvent, StepRecord

_LEARNER = "learner/"

TakeWeights: TypeAlias = Callable[[int], tuple[Weights, Weights]]
"""Policy version after a step -> the weights before and after it; asked once a step."""


class RolloutMonitor:
    """Writes ``rollouts/step-000001.parquet``, ``rollouts/eval-000010.parquet`` and records.

    Training: step 1, the last step and every step that ``every`` divides, or each one where steps
    are recorded. Evaluations: all.
    """

    def __init__(
        self,
        directory: Path,
        *,
        every: int,
        take_weights: TakeWeights | None = None,
        facts: Facts | None = None,
    ) -> None:
        """Write below the run directory ``directory``; ``every`` >= 1. Raises OSError.

        Steps are recorded where ``take_weights`` is given, with ``facts`` in each record.
        """
        assert every >= 1, "for rollouts_every = 0 build no RolloutMonitor"
        self._directory = directory
        self._every = every
        self._take_weights = take_weights
        self._facts = facts or {}
        (directory / ROLLOUTS_FOLDER).mkdir(exist_ok=True)
        self._writer = BackgroundWriter("rollouts")

    def on_step(self, record: StepRecord) -> None:
        """Have the step's groups written, if it is its turn, and the step recorded.

        Waits where the disk is several steps behind. Raises what an earlier write failed with.
        """
        if self._take_weights is not None:
            before, after = self._take_weights(record.policy_version)
            self._writer.submit(lambda: self._record(record, before, after))
        elif record.step % self._every == 0 or record.step in {1, record.num_steps}:
            self._writer.submit(lambda: self._write("step", record))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Have the evaluation's groups written. Waits and raises as `on_step` does."""
        self._writer.submit(lambda: self._write("eval", record))

    def on_event(self, event: RunEvent) -> None:
        """Events hold no rollouts."""

    def flush(self) -> None:
        """Return once everything told so far is in its files, which the writing thread sees to.

        Raises what a write failed with, and TimeoutError.
        """
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, kind: str, record: StepRecord | EvaluationRecord) -> str:
        return write_rollouts(rollout_file(self._directory, kind, record.step), record.groups)

    def _record(self, record: StepRecord, before: Weights, after: Weights) -> None:
        append_record(
            self._directory,
            RecordedStep(
                step=record.step,
                before=before,
                after=after,
                metrics={n: x for n, x in record.metrics.items() if n.startswith(_LEARNER)},
                rollouts=self._write("step", record),
                facts=self._facts,
            ),
        )
