"""What the machine says of itself."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int | None:
    """Return the bytes that Linux calls available; None elsewhere, where nothing is claimed."""
    path = Path("/proc/meminfo")
    if not path.is_file():
        return None
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
