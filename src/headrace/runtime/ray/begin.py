"""The way into Ray for a command: what is asked before ray is imported, and then its places."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import ClusterError
from headrace.runtime.places import Places
from headrace.runtime.preflight import PreparedRun
from headrace.runtime.ray.environment import prepare


@contextmanager
def places_on_ray(
    prepared: PreparedRun, directory: Path, address: str | None, num_nodes: int | None
) -> Iterator[Places]:
    """Yield the places of a run on the cluster at ``address``, or on a Ray of its own with None.

    ``directory``: of the run. ``num_nodes``: machines to wait for. Raises ClusterError where the
    run cannot be there.
    """
    if importlib.util.find_spec("ray") is None:
        msg = (
            "--runtime ray: ray is not installed in this environment; "
            "pip install -c constraints.txt -e '.[ray]' in the source folder"
        )
        raise ClusterError(msg)
    prepare(is_own=address is None)
    from headrace.runtime.ray.places import placed  # noqa: PLC0415 - ray reads what was prepared

    with placed(prepared, directory, address, num_nodes) as places:
        yield places
