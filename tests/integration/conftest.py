"""Fixtures of the whole command: a laboratory, a finished run, a verb called in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lab import Command, Ended, Lab, make_lab

from headrace.cli import main


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Shared: tests give their own --output and change nothing."""
    return make_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def own_lab(tmp_path: Path) -> Lab:
    """Of this test alone, to break."""
    return make_lab(tmp_path / "lab")


@pytest.fixture(scope="session")
def finished(lab: Lab) -> Path:
    """The directory of a run that was never interrupted."""
    ended = lab.train("finished").wait()
    assert ended.status == 0, ended.err
    return lab.folder / "finished"


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a verb in this process: nothing to import again."""

    def call(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else int(code is not None), *captured)

    return call
