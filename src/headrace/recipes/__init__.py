"""Recipes that ship with the package, and how a recipe's name or path is found."""

from __future__ import annotations

import difflib
from pathlib import Path

from headrace.errors import ConfigError

_FOLDER = Path(__file__).resolve().parent


def shipped_recipes() -> tuple[str, ...]:
    """Return the names of all shipped recipes."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def find_recipe(name_or_path: str) -> Path:
    """Return the TOML file of a shipped recipe's name or of a path. Raises ConfigError."""
    if name_or_path in shipped_recipes():
        return _FOLDER / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    close = difflib.get_close_matches(name_or_path, shipped_recipes(), n=1, cutoff=0.4)
    meant = f" (did you mean {close[0]}?)" if close else ""
    msg = (
        f"recipe {name_or_path}: neither a file nor a shipped recipe{meant}; "
        f"shipped are {', '.join(shipped_recipes())}"
    )
    raise ConfigError(msg)
