from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.bench import learn
from headrace.bench.learn_peak import full, tiled


def test_both_versions_compute_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8), torch.randn(30, 8)
    ids = torch.arange(9)
    torch.testing.assert_close(tiled(hidden, weight, ids), full(hidden, weight, ids))


def test_a_peak_counts_the_logits_that_are_held(tmp_path: Path) -> None:
    peaks = {}
    tokens, vocabulary = 2048, 32768
    for kind in ("tiled", "full"):
        command = [sys.executable, "-m", "headrace.bench.learn_peak", kind, str(tmp_path / kind)]
        sizes = [str(tokens), str(vocabulary), "16"]
        subprocess.run([*command, *sizes], check=True)
        peaks[kind] = float((tmp_path / kind).read_text(encoding="utf-8"))
    logits = tokens * vocabulary * 4 / 2**20
    # Logits and log-probs are there together, and backward a gradient beside them.
    assert 1.9 * logits < peaks["full"] < 4.5 * logits
    assert peaks["tiled"] < 0.5 * logits


def test_the_share_is_that_of_the_two_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "_peak_mib", lambda kind, _: {"tiled": 30.0, "full": 300.0}[kind])
    figures = learn.measure((), lambda _: None)
    assert figures["chunked_logprob_memory_share"] == pytest.approx(0.1)
