"""Removing what a program left in its folder, however it built it.

Owns: no path grows long, nothing recurses, no symbolic link is followed, and a mode that forbids
it is changed.
"""

from __future__ import annotations

import os
import stat


def empty(parent: str) -> None:
    """Remove everything in ``parent``, whatever its depth, names and modes. Raises OSError.

    Folders are moved up beside one another before they are emptied: no path grows long and nothing
    recurses, whatever a program built.
    """
    place = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    moved = 0
    try:
        while names := os.listdir(place):  # noqa: PTH208 - of a descriptor
            for name in names:
                if not _is_folder(name, place):
                    os.unlink(name, dir_fd=place)
                    continue
                moved = _flatten(name, place, moved)
                os.rmdir(name, dir_fd=place)
    finally:
        os.close(place)


def _flatten(name: str, place: int, moved: int) -> int:
    """Empty the folder ``name`` of ``place``; return how many folders were moved up so far."""
    os.chmod(name, 0o700, dir_fd=place)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        for inner in os.listdir(folder):  # noqa: PTH208 - as above
            if _is_folder(inner, folder):
                os.chmod(inner, 0o700, dir_fd=folder)
                moved += 1
                os.rename(inner, f"moved {moved}", src_dir_fd=folder, dst_dir_fd=place)
            else:
                os.unlink(inner, dir_fd=folder)
    finally:
        os.close(folder)
    return moved


def _is_folder(name: str, place: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)
