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


def memory_shortage(num_more: int, bytes_of_each: int) -> str | None:
    """Say why there is no memory for ``num_more`` processes; None where there is, or may be."""
    available = available_memory()
    if num_more <= 0 or available is None or num_more * bytes_of_each <= available:
        return None
    return (
        f"each takes at least {bytes_of_each / 2**30:.2f} GiB of this machine's memory, and "
        f"{available / 2**30:.1f} GiB are free; at most {available // bytes_of_each} fit"
    )
