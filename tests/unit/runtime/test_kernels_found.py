"""What the doctor says of the kernels for processors."""

from __future__ import annotations

import pytest

from headrace.runtime import diagnosis
from headrace.runtime.diagnosis import Finding, diagnose


def kernels() -> Finding:
    (finding,) = (finding for finding in diagnose() if finding.name == "kernels")
    return finding


def test_the_doctor_names_the_instructions_that_kernels_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "has_feature", lambda name: name == "avx512f")
    assert kernels().detail.endswith(", avx512f")
    monkeypatch.setattr(diagnosis, "has_feature", lambda _: False)
    assert kernels().detail.endswith("none of AVX-512's instructions")
    assert kernels().present


def test_kernels_without_the_threads_of_torch_are_missed_and_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "parallel_function", lambda: None)
    assert not kernels().present
    assert "one thread" in kernels().detail
    assert kernels().remedy
