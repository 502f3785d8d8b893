"""From a job to what a cell is given: its payload, its input and its terms.

Owns: what a program is given is its source, one input and its files, and nothing else. A language
that is compiled gives two pieces of work: the first one's result is a file of the second.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.verifiers.sandbox.execution import Job, Limits
from headrace.verifiers.sandbox.inside.protocol import Terms

MIB = 1 << 20

_COMPILER_LIMITS = Limits(
    cpu_seconds=30.0,
    wall_seconds=60.0,
    memory_mib=2048,
    output_bytes=32 * MIB,
    num_processes=16,
    disk_mib=256,
)
_MARSHAL_VERSION = 2
"""Every interpreter since reads it."""
_SLACK_BYTES = 256 * MIB
"""Of writable memory that a runtime reserves, such as the stacks of its threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """How programs of one language are run by commands."""

    source: str
    """The name of the program's file."""
    run: tuple[str, ...]
    """The command that runs it, in the program's directory."""
    compile: tuple[str, ...] = ()
    """The command that makes `product` of it first, if any."""
    product: str = ""
    """The file that the compiler makes."""
    reserves_memory: bool = False
    """Its runtime reserves far more addresses than it uses (V8, Go, the JVM): what is written to
    is limited instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a cell runs once."""

    job_id: str
    payload: bytes = field(repr=False)
    """Read by the program's own process alone."""
    stdin: bytes = field(repr=False)
    limits: Limits
    limits_addresses: bool = True
    may_execute: bool = False
    may_execute_own: bool = False

    def terms(self, base_bytes: int) -> Terms:
        """Return the terms for a process that is forked with ``base_bytes`` of addresses in use."""
        memory = self.limits.memory_mib * MIB
        return Terms(
            cpu_seconds=self.limits.cpu_seconds,
            address_space=memory + base_bytes if self.limits_addresses else 0,
            data_bytes=memory + base_bytes + (0 if self.limits_addresses else _SLACK_BYTES),
            file_bytes=self.limits.disk_mib * MIB,
            disk_bytes=self.limits.disk_mib * MIB,
            num_processes=self.limits.num_processes,
            may_execute=self.may_execute,
            may_execute_own=self.may_execute_own,
        )


def python_work(job: Job) -> Work:
    """Return the work of a job in Python."""
    call = job.call
    function, arguments = ("", b"") if call is None else (call.function, call.arguments)
    asked = (job.source, function, arguments, job.limits.output_bytes)
    payload = _payload(job.files, (), asked)
    return Work(job_id=job.job_id, payload=payload, stdin=job.stdin, limits=job.limits)


def compile_work(job: Job, language: Language) -> Work:
    """Return the work that compiles ``job``'s program; its result is the file that comes of it."""
    files = {language.source: _text(job.source)}
    payload = _payload(files, language.compile, (language.product,))
    return Work(
        job_id=job.job_id,
        payload=payload,
        stdin=b"",
        limits=_COMPILER_LIMITS,
        may_execute=True,
    )


def command_work(job: Job, language: Language, product: bytes | None) -> Work:
    """Return the work that runs ``job``'s program; ``product`` is what compiling made of it."""
    made = (language.source, _text(job.source)) if product is None else (language.product, product)
    payload = _payload({**job.files, made[0]: made[1]}, language.run, ("",))
    return Work(
        job_id=job.job_id,
        payload=payload,
        stdin=job.stdin,
        limits=job.limits,
        limits_addresses=not language.reserves_memory,
        may_execute=True,
        may_execute_own=product is not None,
    )


def _text(source: str) -> bytes:
    """Return ``source`` as a file; what is no Unicode is for the compiler to refuse, not for us."""
    return source.encode("utf-8", "surrogatepass")


def problem_of(job: Job, languages: Mapping[str, Language]) -> str | None:
    """Return why ``job`` cannot be run by anyone here, or None."""
    if job.language != "python" and job.language not in languages:
        known = ", ".join(["python", *sorted(languages)])
        return f"language {job.language!r}: not set up; there are {known}"
    if job.call is not None and job.language != "python":
        return f"language {job.language!r}: only a function in Python can be called"
    bad = [name for name in job.files if name in {"", ".", ".."} or "/" in name or "\0" in name]
    if bad:
        return f"files: {bad[0]!r} is not a plain name"
    return None


def _payload(
    files: Mapping[str, bytes], command: tuple[str, ...], work: tuple[str | bytes | int, ...]
) -> bytes:
    """Return what `program.become` reads: ``work`` is the rest of what it does with ``command``."""
    return marshal.dumps((dict(files), list(command), work), _MARSHAL_VERSION)
