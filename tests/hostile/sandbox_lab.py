"""Pools of every tier that works on this machine, and what a test needs of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from headrace.verifiers.sandbox.execution import Execution, Job, Limits, PythonCall, Tier
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.pool import PoolSpec, SandboxPool
from headrace.verifiers.sandbox.tiers import TierReport, probe
from headrace.verifiers.sandbox.work import Language

TIERS = (Tier.CELL, Tier.LOCK, Tier.BUBBLEWRAP)

LANGUAGES = {
    "cpp": Language(
        source="main.cpp",
        compile=("g++", "-o", "main", "main.cpp"),
        product="main",
        run=("./main",),
    ),
    "javascript": Language(source="main.js", run=("node", "main.js"), reserves_memory=True),
}

QUICK = Limits(cpu_seconds=1.0, wall_seconds=20.0, memory_mib=256, output_bytes=1 << 16)
"""For programs that use up something; the wall clock is far away, so a busy machine changes
nothing."""

_ids = itertools.count()


def spec_of(tier: Tier) -> CellSpec:
    return CellSpec(tier=tier, interpreter=interpreter(tier))


def interpreter(tier: Tier) -> str:
    """Root's programs become another user in the lock tier, who may not read root's own Python."""
    system = "/usr/bin/python3"
    if tier is Tier.LOCK and os.geteuid() == 0 and Path(system).exists():
        return system
    return sys.executable


@lru_cache
def report(tier: Tier) -> TierReport:
    return probe(tier, spec_of(tier))


def here(tier: Tier) -> bool:
    return report(tier).works


def strongest() -> Tier:
    """The strongest tier of this machine; skips the test where there is none."""
    tier = next((tier for tier in (Tier.CELL, Tier.BUBBLEWRAP, Tier.LOCK) if here(tier)), None)
    if tier is None:
        pytest.skip("code cannot be isolated on this machine; `headrace doctor` says why")
    return tier


def make_pool(tier: Tier, *, num_cells: int = 1, max_queued: int = 1024) -> SandboxPool:
    return SandboxPool(
        PoolSpec(
            cell=spec_of(tier), num_cells=num_cells, languages=LANGUAGES, max_queued=max_queued
        )
    )


def job(
    source: str,
    *,
    stdin: bytes = b"",
    limits: Limits = QUICK,
    call: PythonCall | None = None,
    language: str = "python",
) -> Job:
    return Job(
        job_id=f"test-{next(_ids)}",
        source=source,
        stdin=stdin,
        limits=limits,
        call=call,
        language=language,
    )


def run(pool: SandboxPool, asked: Job | str) -> Execution:
    return asyncio.run(pool.run(job(asked) if isinstance(asked, str) else asked))


def has(program: str) -> bool:
    return shutil.which(program) is not None
