"""How what engines count becomes metrics. What nothing was counted of is left out."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.percentiles import percentiles as percentiles_of


def share(name: str, part: float, whole: float) -> dict[str, float]:
    """Return ``part`` of ``whole`` as the metric ``name``."""
    return {name: part / whole} if whole > 0 else {}


def percentiles(name: str, unit: str, values: Sequence[float]) -> dict[str, float]:
    """Return median and 99th percentile of ``values`` as ``name``/p50_``unit`` and p99."""
    if not values:
        return {}
    middle, late = percentiles_of(values, (50, 99))
    return {f"{name}/p50_{unit}": middle, f"{name}/p99_{unit}": late}
