from __future__ import annotations

from typing import Any

import pytest

from headrace.config import WeightSyncConfig
from headrace.config.weight_sync import weight_sync_refusals


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"directory": "/x"}, 'weight_sync.directory with weight_sync.transport = "auto"'),
        ({"transport": "files"}, "give the absolute path of a directory"),
        ({"transport": "files", "directory": "x"}, "give the absolute path of a directory"),
        ({"transport": "memory", "delta": {}}, "nothing travels, so nothing is saved"),
        ({"host": "10.0.0.1"}, "weight_sync.host with weight_sync.transport"),
        (
            {"transport": "files", "directory": "/x", "fan_out": 3},
            'set weight_sync.transport = "network"',
        ),
        ({"host": "::1"}, 'weight_sync.transport = "network" or "broadcast"'),
        ({"transport": "network", "bucket_mib": 8}, 'set weight_sync.transport = "broadcast"'),
        ({"transport": "broadcast", "fan_out": 3}, 'set weight_sync.transport = "network"'),
        ({"transport": "broadcast", "delta": {}}, "a broadcast is of all weights"),
        ({"transport": "broadcast", "directory": "/x"}, "nothing is written there"),
    ],
)
def test_what_nothing_would_read_is_refused(settings: dict[str, Any], expected: str) -> None:
    config = WeightSyncConfig.model_validate(settings, strict=False)
    (refusal,) = weight_sync_refusals(config)
    keys, text = refusal
    assert expected in text
    assert all(key.startswith("weight_sync.") and key in text for key in keys)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transport": "shared_memory", "directory": "/memory", "delta": {"whole_every": 2}},
        {"transport": "files", "directory": "/x"},
        {"transport": "network", "host": "10.0.0.1", "fan_out": 4, "delta": {}},
        {"transport": "broadcast", "host": "10.0.0.1", "bucket_mib": 256},
    ],
)
def test_what_is_read_is_taken(settings: dict[str, Any]) -> None:
    config = WeightSyncConfig.model_validate(settings, strict=False)
    assert list(weight_sync_refusals(config)) == []
