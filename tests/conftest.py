"""What holds for every test."""

from __future__ import annotations

from contextlib import suppress

# The environment of `make test-vllm` has none, and its tests need none.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # An example is never too slow: a machine that stands still for a moment is no fault of what is
    # tested, and hangs are found by the time limit of a test.
    settings.register_profile(
        "headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("headrace")
