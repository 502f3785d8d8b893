from __future__ import annotations

from typing import Any

import pytest

from headrace.config import parse_config
from headrace.errors import ConfigError


def recipe(**lora: Any) -> dict[str, Any]:  # noqa: ANN401 - what a table can hold
    return {
        "num_steps": 1,
        "model": {"path": "unused"},
        "data": {"train": {"type": "jsonl", "path": "unused"}},
        "verifier": {"components": {"answer": {"kind": "exact"}}},
        "learner": {"lora": lora},
    }


def test_an_empty_table_adapts_every_matrix() -> None:
    lora = parse_config(recipe()).learner.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.start) == (16, 32.0, None)
    assert len(lora.targets) == 7


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": 0}, "learner.lora.rank = 0"),
        ({"alpha": 0.0}, "learner.lora.alpha = 0"),
        ({"targets": []}, r"learner.lora.targets = \[\].*not empty"),
        ({"targets": ["c_attn"]}, r"targets.*c_attn.*each one of \"q_proj\""),
        ({"dropout": 0.1}, "learner.lora.dropout: unknown key"),
    ],
)
def test_what_would_train_nothing_or_is_not_computed_is_refused_by_its_key(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(recipe(**setting))
