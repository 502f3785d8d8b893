"""Stands in for the sandbox where what is tested is decided outside of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from typing import Any

from headrace.verifiers.code.component import CodeReport
from headrace.verifiers.sandbox import canonical
from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Tier

Grade = Callable[..., CodeReport]


class InProcess:
    """Runs programs of our own in this process; ``# ends: oom`` in one says how it ends."""

    def __init__(self, wait_for: int = 1) -> None:
        self.jobs: list[Job] = []
        self.all_started = asyncio.Event()
        """Set once ``wait_for`` executions have begun."""
        self._wait_for = wait_for
        self.num_cancelled = 0
        self.num_closed = 0
        self.seconds = 0.0
        """Before each execution, on the clock."""

    async def run(self, job: Job) -> Execution:
        self.jobs.append(job)
        if len(self.jobs) == self._wait_for:
            self.all_started.set()
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        _, found, said = job.source.partition("# ends: ")
        if found:
            ending = Ending(said.split()[0])
            return Execution(job_id=job.job_id, tier=Tier.NONE, ending=ending, detail="as told")
        return executed(job)

    async def close(self) -> None:
        self.num_closed += 1


def executed(job: Job) -> Execution:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    errors = io.StringIO()
    status, returned = 0, None
    stdin = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(job.stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                returned = called(job)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:  # noqa: BLE001 - as an interpreter does
                traceback.print_exc(file=errors)
                status = 1
    finally:
        sys.stdin = stdin
    return Execution(
        job_id=job.job_id,
        tier=Tier.NONE,
        ending=Ending.EXITED,
        exit_status=status,
        stdout=out.buffer.getvalue(),  # type: ignore[attr-defined] - the BytesIO from above
        stderr=errors.getvalue().encode(),
        returned=returned,
    )


def called(job: Job) -> bytes | None:
    scope: dict[str, Any] = {"__name__": "__main__" if job.call is None else "program"}
    exec(compile(job.source, "program.py", "exec"), scope)  # noqa: S102 - the test wrote it
    if job.call is None:
        return None
    owner, _, name = job.call.function.rpartition(".")
    function = getattr(scope[owner](), name) if owner else scope[name]
    return canonical.encode(function(*canonical.decode(job.call.arguments)))
