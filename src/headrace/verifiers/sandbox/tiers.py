"""Which tier works on this machine, tried by doing what a program might do, and which is taken.

Owns: a tier that was not seen to hold is never used, a weaker one never in place of the one that
was asked for, and none at all only where the recipe says so. What it tries is in `_ATTEMPTS`; what
each tier promises is in docs/SANDBOX.md.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from dataclasses import dataclass, replace

from headrace.config import SandboxConfig
from headrace.errors import ConfigError
from headrace.scratch import ScratchFolder
from headrace.verifiers.sandbox.execution import Execution, Job, Limits, Tier
from headrace.verifiers.sandbox.launch import PRELOAD, CellSpec
from headrace.verifiers.sandbox.pool import PoolSpec, SandboxPool
from headrace.verifiers.sandbox.work import Language, python_work

_LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0)
_ORDER = (Tier.CELL, Tier.BUBBLEWRAP, Tier.LOCK)
"""The strongest first."""

_ATTEMPTS = """
import os, socket, subprocess, sys, wave
secret, outside, supervisor = {secret!r}, {outside!r}, {supervisor!r}

def attempt(name, action):
    try:
        action()
    except BaseException:
        return
    print(name)

attempt("read a file of the host", lambda: print(open(secret).read()))
attempt("wrote a file outside its directory", lambda: open(outside, "w").close())
attempt("wrote into the system", lambda: open("/usr/planted", "w").close())
attempt("opened a socket", lambda: socket.socket())
attempt("started another program", lambda: os.execv("/bin/true", ["true"]))
attempt("reached the supervisor with a signal", lambda: os.kill(supervisor, 0))
attempt("became root", lambda: os.setuid(0) if os.getuid() else 1 / 0)
left = os.listdir(".")
if left:
    print("found what another one left:", left)
open("left behind", "w").close()
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(1000)
print("done")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What came of trying one tier."""

    tier: Tier
    works: bool
    detail: str
    remedy: str = ""
    """What to do to have it."""


def probe(tier: Tier, spec: CellSpec | None = None) -> TierReport:
    """Start a cell of ``tier``, attack it, and report. Takes less than a second; blocks.

    ``spec``: what else a run's cells are to be.
    """
    problem = _missing(tier) or _attacked(replace(spec or CellSpec(tier=tier), tier=tier))
    if problem is None:
        return TierReport(tier=tier, works=True, detail=_PROMISES[tier])
    return TierReport(tier=tier, works=False, detail=problem, remedy=_REMEDIES[tier])


def choose_tier(config: SandboxConfig) -> Tier:
    """Return the tier that ``config`` asks for, seen to hold. Raises ConfigError if none does."""
    wanted = _ORDER if config.tier == "auto" else (Tier(config.tier),)
    refused: list[TierReport] = []
    for tier in wanted:
        report = probe(tier, _cell_spec(config, tier))
        if report.works:
            return tier
        refused.append(report)
    if config.tier == "auto" and config.allow_unsafe:
        return Tier.NONE
    reasons = "; ".join(f"{report.tier}: {report.detail} ({report.remedy})" for report in refused)
    msg = (
        f'verifier.sandbox.tier = "{config.tier}": code cannot be isolated here. {reasons}. '
        'allow_unsafe = true with tier = "auto" runs it without isolation'
    )
    raise ConfigError(msg)


def build_executor(config: SandboxConfig) -> SandboxPool:
    """Return the executor of a run. Raises ConfigError where code cannot be isolated as asked."""
    tier = choose_tier(config)
    languages = {
        name: Language(
            source=toolchain.source,
            run=toolchain.run,
            compile=toolchain.compile,
            product=toolchain.product,
            reserves_memory=toolchain.reserves_memory,
        )
        for name, toolchain in config.languages.items()
    }
    spec = PoolSpec(
        cell=_cell_spec(config, tier),
        num_cells=config.num_cells or len(os.sched_getaffinity(0)),
        languages=languages,
        max_queued=config.max_queued,
    )
    return SandboxPool(spec)


def _cell_spec(config: SandboxConfig, tier: Tier) -> CellSpec:
    return CellSpec(
        tier=tier,
        interpreter=config.interpreter or sys.executable,
        preload=tuple(dict.fromkeys((*PRELOAD, *config.preload))),
        shown=config.readable,
        num_jobs=config.jobs_per_cell,
    )


def _missing(tier: Tier) -> str | None:
    """Return what is plainly not there, before anything is tried."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if tier is Tier.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return None


def _attacked(spec: CellSpec) -> str | None:
    """Return what a program could do in such a cell and must not, or why there is no cell."""
    # Only Linux can even import it.
    from headrace.verifiers.sandbox.cell import Cell, CellError  # noqa: PLC0415
    from headrace.verifiers.sandbox.watch import descendants  # noqa: PLC0415

    with ScratchFolder("probe") as folder:
        place = folder.path
        place.chmod(0o777)
        secret = place / "secret"
        secret.write_text(secrets.token_hex())
        source = _ATTEMPTS.format(
            secret=str(secret), outside=str(place / "planted"), supervisor=os.getpid()
        )
        try:
            cell = Cell(replace(spec, num_jobs=max(4, spec.num_jobs)))
        except CellError as error:
            return str(error)
        reader, writer = os.pipe()
        try:
            if spec.jobs_per_cell > 1:
                # With its first job a cell may start the process that forks.
                cell.run(python_work(Job(job_id="first", source="", limits=_LIMITS)), reader)
            before = len(list(descendants(cell.process_id)))
            for _ in range(min(2, spec.jobs_per_cell)):
                job = Job(job_id="probe", source=source, limits=_LIMITS)
                problem = _problem_of(cell.run(python_work(job), reader))
                if problem is None and len(list(descendants(cell.process_id))) > before:
                    problem = "a process outlived its program"
                if problem is not None:
                    return problem
        finally:
            cell.close()
            os.close(reader)
            os.close(writer)
    return None


def _problem_of(execution: Execution) -> str | None:
    if execution.is_clean and execution.stdout == b"done\n":
        return None
    said = execution.stdout.decode(errors="replace").replace("done\n", "").strip()
    failed = execution.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    parts = [f"a program {said}" if said else "", failed, execution.detail]
    return ", ".join(part for part in parts if part) or f"a program ended by {execution.ending}"


_PROMISES = {
    Tier.CELL: "namespaces, Landlock, seccomp, rlimits; a fork for each program",
    Tier.BUBBLEWRAP: "bubblewrap for each program, with Landlock, seccomp and rlimits",
    Tier.LOCK: "Landlock, seccomp, rlimits; the host's processes and file names can be seen",
    Tier.NONE: "no isolation",
}

_REMEDIES = {
    Tier.CELL: (
        "allow user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0 or "
        "user.max_user_namespaces=10000, in a container --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined; Landlock needs Linux 5.13 booted with lsm=landlock"
    ),
    Tier.BUBBLEWRAP: "apt-get install bubblewrap; it needs user namespaces, unless setuid",
    Tier.LOCK: (
        "Linux 6.12 or later with Landlock; for root an interpreter that other users can read, "
        'such as verifier.sandbox.interpreter = "/usr/bin/python3"'
    ),
    Tier.NONE: "",
}
