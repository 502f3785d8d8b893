"""The import rule of docs/DESIGN.md, and that the check of it catches what it is there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    only_code = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.json")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=only_code)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_module_imports_from_lower_levels_only() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "statement", "broken"),
    [
        ("types.py", "import headrace.config", "headrace.types -> headrace.config"),
        ("roles.py", "import headrace.config", "headrace.roles -> headrace.config"),
        ("data/planted.py", "import headrace.verifiers", "headrace.data.planted -> headrace.verif"),
        ("roles.py", "import torch", "headrace.roles -> torch"),
        ("runtime/planted.py", "import vllm", "headrace.runtime.planted -> vllm"),
        ("data/planted.py", "import ray", "headrace.data.planted -> ray"),
    ],
)
def test_a_planted_import_is_caught(copy: Path, module: str, statement: str, broken: str) -> None:
    with (copy / "src" / "headrace" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{statement}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert broken in done.stdout


def test_a_package_of_no_level_is_caught(copy: Path) -> None:
    stray = copy / "src" / "headrace" / "stray"
    stray.mkdir()
    (stray / "__init__.py").touch()
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "stray" in done.stdout
