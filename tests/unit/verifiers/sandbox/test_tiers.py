from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import headrace.verifiers.sandbox.inside
from headrace.config import SandboxConfig
from headrace.errors import ConfigError
from headrace.verifiers.sandbox import tiers
from headrace.verifiers.sandbox.execution import Tier
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.tiers import TierReport, choose_tier, probe

INSIDE = Path(headrace.verifiers.sandbox.inside.__file__).parent


def only(monkeypatch: pytest.MonkeyPatch, *working: Tier) -> None:
    """Have a machine on which only ``working`` work."""

    def report(tier: Tier, spec: CellSpec | None = None) -> TierReport:
        assert spec is None or spec.tier is tier
        works = tier in working
        return TierReport(tier=tier, works=works, detail="no reason", remedy=f"mend {tier}")

    monkeypatch.setattr(tiers, "probe", report)


@pytest.mark.parametrize(
    ("working", "taken"),
    [
        ((Tier.LOCK, Tier.CELL, Tier.BUBBLEWRAP), Tier.CELL),
        ((Tier.LOCK, Tier.BUBBLEWRAP), Tier.BUBBLEWRAP),
        ((Tier.LOCK,), Tier.LOCK),
    ],
)
def test_the_strongest_tier_that_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, working: tuple[Tier, ...], taken: Tier
) -> None:
    only(monkeypatch, *working)
    assert choose_tier(SandboxConfig()) is taken


def test_a_tier_that_was_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, Tier.LOCK, Tier.BUBBLEWRAP)
    with pytest.raises(ConfigError, match="mend cell"):
        choose_tier(SandboxConfig(tier="cell", allow_unsafe=True))


def test_nothing_is_run_where_no_tier_works(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    with pytest.raises(ConfigError, match=r"mend cell.*mend bubblewrap.*mend lock.*allow_unsafe"):
        choose_tier(SandboxConfig())


def test_no_isolation_at_all_must_be_allowed_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert choose_tier(SandboxConfig(allow_unsafe=True)) is Tier.NONE


def test_a_tier_without_walls_is_found_out() -> None:
    report = probe(Tier.NONE)
    assert not report.works


def test_an_interpreter_that_is_not_there_is_named() -> None:
    report = probe(Tier.CELL, CellSpec(tier=Tier.CELL, interpreter="/nowhere/python"))
    assert not report.works
    assert "/nowhere/python" in report.detail


def test_what_runs_inside_imports_the_standard_library_and_itself_alone() -> None:
    allowed = ("headrace.verifiers.sandbox.inside", "headrace.verifiers.sandbox")
    files = [*INSIDE.glob("*.py"), INSIDE.parent / "canonical.py"]
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith(allowed) or name.split(".")[0] in sys.stdlib_module_names, (
                    f"{file}: {name}"
                )
