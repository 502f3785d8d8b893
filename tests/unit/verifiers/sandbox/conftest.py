from __future__ import annotations

from collections.abc import Iterator

import pytest
from sandbox_lab import make_pool, strongest

from headrace.verifiers.sandbox.pool import SandboxPool


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    """Of the strongest tier of this machine; a test may burn its cells."""
    pool = make_pool(strongest())
    yield pool
    pool.close_blocking()
