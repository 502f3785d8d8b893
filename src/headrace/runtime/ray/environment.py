"""What Ray reads from the environment while it is imported, set before it is.

Owns: a Ray that a run starts for itself can be reached from this machine alone, by this run alone,
and reports nothing to anyone.
"""

from __future__ import annotations

import os
import secrets
import sys

_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Its name is older than what it does: where it is 0, Ray opens every port on 127.0.0.1."""


def prepare(*, is_own: bool) -> None:
    """Set what Ray must find. Call before the first import of ray; idempotent."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not is_own:
        return
    if "ray" in sys.modules:
        assert os.environ.get(_CLUSTERS) == "0", "ray has read its environment already"
        return
    os.environ[_CLUSTERS] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    # Drawn here, or Ray would write one into the home directory, for good.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
