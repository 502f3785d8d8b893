"""What client and server say to each other: versioned JSON, checked on both sides.

JSON with bytes in base64, because pydantic, which checks the shape anyway, reads and writes it in
compiled code, and because nothing in JSON can run. Knows no HTTP beyond the paths and statuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.verifiers.sandbox.execution import Ending, Execution, Job, Limits, Tier

WIRE_VERSION: Final = 1
"""Counts up whenever a message, `Job` or `Execution` changes its shape."""
RUN_PATH = "/v1/run"
HEALTH_PATH = "/v1/health"
METRICS_PATH = "/v1/metrics"
ALIVE_PATH = "/alive"
"""Answers anyone, without a token, and tells nothing but that the process serves."""

CEILING = Limits(
    cpu_seconds=600.0,
    wall_seconds=1800.0,
    memory_mib=65536,
    output_bytes=16 << 20,
    num_processes=1024,
    disk_mib=16384,
)
"""The most that a job may ask of a server."""
_MAX_JOB_ID = 1000
"""Characters."""


class _Message(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_bytes="base64",
        val_json_bytes="base64",
    )


class RunRequest(_Message):
    """Run a job."""

    wire_version: Literal[1] = WIRE_VERSION
    minimum_tier: Tier
    """The server refuses where it offers less."""
    deadline_seconds: float = Field(gt=0.0, le=86400.0)
    """How long whoever asks will wait: a duration, because two machines' clocks differ."""
    job: Job


class RunAnswer(_Message):
    """What became of it."""

    wire_version: Literal[1] = WIRE_VERSION
    execution: Execution


class Health(_Message):
    """What a server says of itself. Read leniently, so that another version can be told by name."""

    model_config = ConfigDict(extra="ignore")

    wire_version: int
    headrace: str
    """Release."""
    python: str
    tier: Tier
    num_slots: int
    """Executions side by side."""
    max_queued: int
    num_queued: int
    num_running: int
    num_done: int
    num_infra: int
    """Of them, those that failed for the server's own reasons."""
    num_repeated: int
    """Questions answered from what was already known or under way."""
    num_refused: int
    """Questions turned away because the queue was full."""
    num_cancelled: int
    """Jobs given up because nobody waited for them any more."""
    uptime_seconds: float
    latency_p50_seconds: float | None
    """From arrival to answer, over the last few thousand; None before the first."""
    latency_p99_seconds: float | None


ErrorKind = Literal[
    "unauthorized",
    "invalid",
    "length_required",
    "too_large",
    "slow_body",
    "tier",
    "full",
    "late",
]

STATUSES: dict[ErrorKind, int] = {
    "unauthorized": 401,
    "invalid": 422,
    "length_required": 411,
    "too_large": 413,
    "slow_body": 408,
    "tier": 412,
    "full": 429,
    "late": 504,
}
"""HTTP status of each refusal."""


class Refusal(_Message):
    """Why there is no answer."""

    kind: ErrorKind
    message: str
    retry_after_seconds: float | None = Field(default=None, ge=0.0)
    """With ``full``: when there may be room."""


def digest(job: Job) -> bytes:
    """Return what tells one piece of work from another: the id and everything that is run.

    Two runs that use one id for different programs do not meet.
    """
    found = hashlib.blake2b(digest_size=16)
    call = None if job.call is None else (job.call.function, job.call.arguments)
    parts = (job.job_id, job.language, job.source, job.stdin, call, job.limits)
    for part in (*parts, *sorted(job.files.items())):
        # repr keeps types and ends apart, and reads lone surrogates too.
        found.update(repr(part).encode("utf-8", "backslashreplace") + b"\0")
    return found.digest()


def is_at_least(tier: Tier, minimum: Tier) -> bool:
    """Whether ``tier`` isolates as well as ``minimum`` or better."""
    order = tuple(Tier)
    return order.index(tier) <= order.index(minimum)


def job_problem(job: Job) -> str | None:
    """Return why a server should not run ``job``, or None."""
    if not 0 < len(job.job_id) <= _MAX_JOB_ID:
        return f"job_id has {len(job.job_id)} characters; from 1 to {_MAX_JOB_ID} are allowed"
    return next(_limit_problems(job.limits), None)


def _limit_problems(limits: Limits) -> Iterator[str]:
    for name in Limits.__dataclass_fields__:
        value, ceiling = getattr(limits, name), getattr(CEILING, name)
        if not 0 < value <= ceiling:
            yield f"limits.{name} = {value:g}: a server allows above 0 and at most {ceiling:g}"


def execution_problem(execution: Execution, job: Job, minimum: Tier) -> str | None:
    """Return why ``execution`` cannot be the answer to ``job``, or None. Trusts nothing in it."""
    return next(_execution_problems(execution, job, minimum), None)


def _execution_problems(execution: Execution, job: Job, minimum: Tier) -> Iterator[str]:
    if execution.job_id != job.job_id:
        yield f"it answers job {execution.job_id[:80]!r} instead of {job.job_id[:80]!r}"
    if not is_at_least(execution.tier, minimum):
        yield f"it ran in tier {execution.tier}, below the demanded {minimum}"
    if execution.ending is Ending.EXITED and execution.exit_status is None:
        yield "it exited without a status"
    if execution.ending is Ending.SIGNALED and execution.signal is None:
        yield "it was ended by a signal that is not told"
    longest = max(len(execution.stdout), len(execution.stderr), len(execution.returned or b""))
    if longest > job.limits.output_bytes:
        yield f"it holds {longest} bytes of output, where {job.limits.output_bytes} were allowed"
    if execution.returned is not None and job.call is None:
        yield "it holds a returned value, and nothing was called"
    if execution.cpu_seconds < 0.0 or execution.wall_seconds < 0.0:
        yield "it took less than no time"


def max_answer_bytes(job: Job) -> int:
    """Return the length that an answer to ``job`` can have: three outputs in base64, and more."""
    return 4 * job.limits.output_bytes + 65536 + 8 * len(job.job_id)
