"""The tiers as a user without any right; root's tests are elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_lab import TIERS, here, report

import headrace
from headrace.verifiers.sandbox.execution import Tier

PYTHON = "/usr/bin/python3"
NOBODY = 65534
NEEDED = ("__init__.py", "scratch.py", "verifiers/__init__.py", "verifiers/sandbox")

DRIVER = """
import json, os, sys
from headrace.verifiers.sandbox.cell import Cell
from headrace.verifiers.sandbox.execution import Job, Limits, Tier
from headrace.verifiers.sandbox.launch import CellSpec
from headrace.verifiers.sandbox.work import python_work

cell = Cell(CellSpec(tier=Tier(sys.argv[1]), num_jobs=100))
never, _ = os.pipe()
found = []
for source in json.load(sys.stdin):
    if cell.spent:
        cell.close()
        cell = Cell(CellSpec(tier=Tier(sys.argv[1])))
    job = Job(job_id="x", source=source, limits=Limits(cpu_seconds=0.3))
    done = cell.run(python_work(job), never)
    found.append([done.ending, done.exit_status, done.stdout.decode()])
cell.close()
print(json.dumps(found))
"""

PROGRAMS = {
    "import os; print(os.listdir('.')); open('left', 'w').close()": ["exited", 0, "[]\n"],
    "import os; print(os.listdir('.')) ": ["exited", 0, "[]\n"],
    "import socket; socket.socket()": ["exited", 1, ""],
    "open('/etc/passwd')": ["exited", 1, ""],
    "import os; os.kill(os.getppid(), 9); print(1)": None,
    "while True: pass": ["timeout_cpu", None, ""],
    "import os\ntry:\n    while True: os.fork()\nexcept OSError: os._exit(5)": ["exited", 5, ""],
    "import wave; print(2)": ["exited", 0, "2\n"],
}


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    """What the sandbox needs of headrace, where nobody can read it."""
    if os.geteuid() != 0 or not Path(PYTHON).exists():
        pytest.skip(f"needs root, to become nobody, and {PYTHON}, which nobody can read")
    folder = Path(tempfile.mkdtemp())
    package = Path(headrace.__file__).parent
    for name in NEEDED:
        target = folder / "headrace" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (package / name).is_dir():
            shutil.copytree(package / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(package / name, target)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


HIDES_ITS_TRACE = """
import ctypes, os
place = os.open(".", os.O_RDONLY)
open("a", "w").close()
# Where the directory goes on after each name: it counts the names that ever were in it.
names = ctypes.create_string_buffer(4096)
number = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
size = ctypes.CDLL(None).syscall(ctypes.c_long(number), place, names, 4096)
print(names.raw[:size].hex())
os.remove("a")
os.utime(".", (0, 0))
"""


def run_as_nobody(tier: Tier, source: Path, programs: list[str]) -> list[list[object]]:
    """Return how each program ended, its status and its output."""
    if not here(tier):
        pytest.skip(f"{tier} does not work here: {report(tier).detail}")
    ended = subprocess.run(
        [PYTHON, "-c", DRIVER, tier.value],
        input=json.dumps(programs),
        env={"PYTHONPATH": str(source), "PATH": os.environ["PATH"]},
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: list[list[object]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("tier", TIERS, ids=lambda tier: tier.value)
def test_a_tier_holds_without_any_right(tier: Tier, source: Path) -> None:
    found = run_as_nobody(tier, source, list(PROGRAMS))
    for got, wanted in zip(found, PROGRAMS.values(), strict=True):
        assert wanted is None or got == wanted


def test_a_directory_whose_owner_hid_what_was_in_it_is_not_kept(source: Path) -> None:
    """A program that is the user who runs it may set the times of its directory back."""
    first, second = run_as_nobody(Tier.CELL, source, [HIDES_ITS_TRACE] * 2)
    assert first[:2] == ["exited", 0]
    assert second == first
