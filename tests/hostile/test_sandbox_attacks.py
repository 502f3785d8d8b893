"""Every attack of the list on every tier that works here; the next program must find nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox_lab import TIERS, has, here, job, make_pool, report, run, strongest

from headrace.bench.verify_attacks import ATTACKS, BREACH, FORGING, LIMITS, Attack
from headrace.verifiers.sandbox.execution import Ending, Execution, Limits, Tier
from headrace.verifiers.sandbox.pool import SandboxPool
from headrace.verifiers.sandbox.watch import descendants

LOOK = "import os; print(os.listdir('.'))"
SLOW = [name for name, attack in ATTACKS.items() if attack.is_slow]
QUICK = [name for name, attack in ATTACKS.items() if not attack.is_slow]


@pytest.fixture(scope="module", params=TIERS, ids=lambda tier: tier.value)
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    tier: Tier = request.param
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    pool = make_pool(tier)
    yield pool
    pool.close_blocking()


@pytest.fixture(scope="module")
def strong_pool() -> Iterator[SandboxPool]:
    pool = make_pool(strongest(), num_cells=2)
    yield pool
    pool.close_blocking()


def limits_of(attack: Attack) -> Limits:
    return replace(LIMITS, wall_seconds=attack.wall_seconds)


def assert_survived(pool: SandboxPool) -> None:
    """The next program starts from nothing, and nothing of the last one runs."""
    after = run(pool, LOOK)
    assert after.stdout == b"[]\n", after
    # A cell is one process, or two: the one that made the namespaces waits for the other.
    for root in pool.process_ids:
        assert len(list(descendants(root))) <= 1


def assert_held(attack: Attack, done: Execution) -> None:
    assert BREACH not in done.stdout, done.stdout.decode()
    assert done.ending in attack.endings, done
    assert done.tier is not Tier.NONE


NEEDS = {
    Tier.CELL: (1, ["unshare", "--user", "--map-root-user", "--mount", "--net", "true"]),
    Tier.LOCK: (6, ["true"]),
    Tier.BUBBLEWRAP: (1, ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]),
}
"""Tier -> the least version of Landlock, and a command that works where the rest is there."""


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.value)
def test_a_tier_works_where_the_machine_has_what_it_needs(tier: Tier) -> None:
    """Or else a fault of ours would pass for a machine without it, and all tests be skipped."""
    from headrace.verifiers.sandbox.inside import landlock  # noqa: PLC0415 - Linux alone has it

    version, command = NEEDS[tier]
    if landlock.version() < version:
        pytest.skip(f"Landlock {version} is needed, and this kernel has {landlock.version()}")
    if not has(command[0]) or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} does not work here")
    assert here(tier), report(tier).detail


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_gets_nothing_and_leaves_nothing(pool: SandboxPool, name: str) -> None:
    attack = ATTACKS[name]
    if pool.tier is Tier.BUBBLEWRAP and name in FORGING:
        pytest.skip("a new sandbox for each program: what concerns the program alone was tried")
    assert_held(attack, run(pool, job(attack.source, limits=limits_of(attack))))
    assert_survived(pool)


@pytest.mark.parametrize("name", SLOW)
def test_what_uses_up_its_time_or_memory_is_ended(strong_pool: SandboxPool, name: str) -> None:
    attack = ATTACKS[name]
    assert_held(attack, run(strong_pool, job(attack.source, limits=limits_of(attack))))
    assert_survived(strong_pool)


@st.composite
def mutants(draw: st.DrawFn) -> str:
    """An attack with some of its lines left out, doubled, or taken from another one."""
    names = st.sampled_from(QUICK)
    lines = ATTACKS[draw(names)].source.splitlines()
    others = ATTACKS[draw(names)].source.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1)) if lines else 0
        match draw(st.sampled_from(["drop", "double", "take"])):
            case "drop":
                lines[at : at + 1] = []
            case "double":
                lines[at:at] = lines[at : at + 1]
            case _:
                lines[at:at] = others[draw(st.integers(0, len(others) - 1)) :][:3]
    return "\n".join(lines)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(source=mutants())
def test_no_mutant_of_an_attack_breaks_the_sandbox(strong_pool: SandboxPool, source: str) -> None:
    done = run(strong_pool, job(source, limits=replace(LIMITS, cpu_seconds=0.5, wall_seconds=3.0)))
    assert done.ending is not Ending.INFRA, done
    assert_survived(strong_pool)
