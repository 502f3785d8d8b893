"""Which models have a name, and in which directory a name or path is found.

A name is either bundled with the package or brought by `headrace fetch`; everything else is a
directory. Never downloads: a name that was not fetched is an error that says how.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from headrace.errors import ModelError
from headrace.models.manifest import Manifest

BUNDLED: dict[str, Path] = {
    "nano": Path(__file__).resolve().parents[1] / "recipes" / "nano" / "model",
}
"""Name -> directory inside the package."""

FETCHABLE: tuple[str, ...] = ("smollm2-135m",)
"""Names that `headrace fetch` knows."""


def cache_directory() -> Path:
    """Return where fetched models live: ``HEADRACE_CACHE``, or headrace in the user's cache."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser().absolute() / "headrace"


def fetched_directory(name: str) -> Path:
    """Return where the model ``name`` of `FETCHABLE` is, or would be once fetched."""
    return cache_directory() / "models" / name


def resolve_model(name_or_path: str) -> Path:
    """Return the model directory that a recipe's ``model.path`` means.

    A name wins over a directory called the same; write ``./nano`` for the directory. Raises
    ModelError for a name not fetched yet, a fetched model with damaged files, and anything unknown.
    """
    if name_or_path in BUNDLED:
        return BUNDLED[name_or_path]
    if name_or_path in FETCHABLE:
        return _fetched(name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.absolute()
    raise ModelError(_unknown(name_or_path, path))


def _fetched(name: str) -> Path:
    directory = fetched_directory(name)
    manifest = Manifest.read(directory)
    if manifest is None:
        msg = f"model {name} is not on this machine; run `headrace fetch {name}`"
        raise ModelError(msg)
    if damage := manifest.damage(directory, checksums=False):
        msg = f"model {name} is damaged: {'; '.join(damage)}; run `headrace fetch {name}` again"
        raise ModelError(msg)
    return directory


def _unknown(name_or_path: str, path: Path) -> str:
    names = [*BUNDLED, *FETCHABLE]
    allowed = f"give one of {', '.join(names)}, or a Hugging Face model directory"
    if path.is_file():
        return f"model {name_or_path!r} is a file; give the directory that holds it"
    if close := difflib.get_close_matches(name_or_path.lower(), names, n=2, cutoff=0.5):
        return f"model {name_or_path!r} is unknown; did you mean {' or '.join(close)}? ({allowed})"
    if name_or_path.count("/") == 1 and not name_or_path.startswith((".", "/", "~")):
        return (
            f"no directory {path.absolute()}. If {name_or_path!r} is a Hugging Face repository, "
            f"run `hf download {name_or_path} --local-dir DIR` and give DIR"
        )
    return f"model {name_or_path!r} is unknown: no directory {path.absolute()}; {allowed}"
