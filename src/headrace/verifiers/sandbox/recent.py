"""What became of the last jobs, so that one that is asked for again is not run again.

Owns: bounded memory. A failure of ours is not kept: asking again is how it is tried again.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.verifiers.sandbox.execution import Ending, Execution, Job

_MAX_JOBS = 512
_MAX_BYTES = 32 << 20


class Recent:
    """Not for several threads at once: its owner has a lock."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Job, Execution]] = OrderedDict()
        self._num_bytes = 0

    def find(self, job: Job) -> Execution | None:
        """Return what became of ``job``, if known. Raises ValueError for another job of its id."""
        found = self._kept.get(job.job_id)
        if found is None:
            return None
        if found[0] != job:
            msg = f"job id {job.job_id!r} stands for another job already"
            raise ValueError(msg)
        return found[1]

    def keep(self, job: Job, execution: Execution) -> None:
        """Remember what became of ``job``; the oldest are forgotten."""
        if execution.ending is Ending.INFRA:
            return
        self._kept[job.job_id] = (job, execution)
        self._num_bytes += _size(job, execution)
        while len(self._kept) > _MAX_JOBS or self._num_bytes > _MAX_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _size(*oldest)


def _size(job: Job, execution: Execution) -> int:
    files = sum(map(len, job.files.values()))
    arguments = 0 if job.call is None else len(job.call.arguments)
    given = len(job.source) + len(job.stdin) + files + arguments
    return given + len(execution.stdout) + len(execution.stderr) + len(execution.returned or b"")
