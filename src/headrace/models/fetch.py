"""Bring a named model to this machine: resumable stages, checksums, one atomic commit.

Each stage of an origin fills its own directory under ``partial/`` of the cache and is sealed with a
manifest (see `headrace.models.manifest`). A run that was interrupted starts again after the last
sealed stage whose checksums still hold; a damaged stage is made again. The model appears under its
final name by one rename, so it is there whole or not at all.

Does not know how any model is downloaded: that is `headrace.models.origins`.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.errors import ModelError
from headrace.models.catalogue import FETCHABLE, cache_directory, fetched_directory
from headrace.models.manifest import Manifest
from headrace.models.origins import Origin, Progress, origins_of


def fetch_model(
    name: str,
    *,
    progress: Callable[[str], None],
    origins: Sequence[Origin] | None = None,
) -> Path:
    """Return the directory of model ``name``, brought here first if it is absent or damaged.

    ``origins`` are tried in order; None means those known for ``name``. ``progress`` gets a line
    for each thing that begins. Raises ModelError if the name is unknown, another fetch of it is
    under way, the cache cannot be written, or no origin could deliver; what is done by then is
    kept for the next try.
    """
    if name not in FETCHABLE:
        raise ModelError(_not_fetchable(name))
    target, partial = fetched_directory(name), cache_directory() / "partial" / name
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _only_fetch(name, partial):
            if not _is_whole(target, progress):
                finished = _from_first(origins or origins_of(name), name, partial, progress)
                _commit(finished, target)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        msg = (
            f"the cache {cache_directory()} cannot be written: {error}; set HEADRACE_CACHE to a "
            "directory that can be, with space for the model"
        )
        raise ModelError(msg) from error
    progress(f"{name} is ready in {target}")
    return target


def _not_fetchable(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), FETCHABLE, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"no model {name!r} to fetch; {hint}known: {', '.join(FETCHABLE)}"


@contextlib.contextmanager
def _only_fetch(name: str, partial: Path) -> Iterator[None]:
    """Two fetches of one model would write into each other's stages."""
    with partial.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = f"another `headrace fetch {name}` is at work in {partial}; wait for it to end"
            raise ModelError(msg) from None
        yield


def _is_whole(target: Path, progress: Progress) -> bool:
    manifest = Manifest.read(target)
    if manifest is None:
        return False
    progress(f"checking {target}")
    damage = manifest.damage(target, checksums=True)
    for line in damage:
        progress(f"{line}; fetching again")
    return not damage


def _from_first(origins: Sequence[Origin], name: str, partial: Path, progress: Progress) -> Path:
    """Return the finished directory of the first origin that delivers."""
    failures = []
    for origin in origins:
        try:
            return _run_stages(origin, partial / origin.name, progress)
        except ModelError as error:
            progress(f"{origin.name}: {error}")
            failures.append(f"{origin.name}: {error}")
    msg = f"{name} could not be fetched. " + "; ".join(failures)
    raise ModelError(msg)


def _run_stages(origin: Origin, directory: Path, progress: Progress) -> Path:
    """Run what is not sealed yet, in order, and return the last stage's directory."""
    places = [directory / f"{index}-{stage.name}" for index, stage in enumerate(origin.stages)]
    done = _num_sealed(places, progress)
    if done < len(places):
        origin.check()
    for index in range(done, len(places)):
        stage, place = origin.stages[index], places[index]
        progress(f"{origin.name}: {stage.title}")
        # Not emptied first: what a downloader left half-way it may use again.
        place.mkdir(parents=True, exist_ok=True)
        stage.run(places[index - 1] if index else place, place)
        Manifest.seal(place, origin.name)
    return places[-1]


def _num_sealed(places: Sequence[Path], progress: Progress) -> int:
    """Return how many stages need not run: up to the last one that is sealed and undamaged."""
    for done in range(len(places), 0, -1):
        place = places[done - 1]
        manifest = Manifest.read(place)
        if manifest is None:
            continue
        damage = manifest.damage(place, checksums=True)
        if not damage:
            progress(f"going on after {place.name}, which is whole")
            return done
        progress(f"{damage[0]}; making it again")
        shutil.rmtree(place)
    return 0


def _commit(finished: Path, target: Path) -> None:
    """Rename into place. Between the two renames the model is absent, never half there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        damaged = finished.with_name("damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        target.rename(damaged)
    finished.rename(target)
