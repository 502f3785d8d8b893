"""More generators than memory holds are refused before anything is started."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.errors import ConfigError
from headrace.runtime.generator_room import bytes_of_each, require_room
from headrace.runtime.preflight import PreparedRun

MANY = ('placement.generators="disaggregated"', "placement.num_generators=1000")


def test_more_generators_than_memory_holds_are_refused_with_what_is_free(
    prepare: Callable[..., PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(*MANY)
    monkeypatch.setattr("headrace.host.available_memory", lambda: 16 * 2**30)
    with pytest.raises(
        ConfigError, match=r"placement\.num_generators = 1000: .*16\.0 GiB are free; at most 81 fit"
    ):
        require_room(prepared.config, prepared.model)
    monkeypatch.setattr("headrace.host.available_memory", lambda: 2**40)
    require_room(prepared.config, prepared.model)


def test_one_generator_beside_the_learner_asks_for_no_room(
    prepare: Callable[..., PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.host.available_memory", lambda: 1)
    prepared = prepare()
    require_room(prepared.config, prepared.model)


def test_each_takes_its_weights_in_its_own_number_format(
    prepare: Callable[..., PreparedRun],
) -> None:
    wide, narrow = (prepare(f'generator.dtype="{name}"') for name in ("float32", "bfloat16"))
    sizes = [bytes_of_each(prepared.config, prepared.model) for prepared in (wide, narrow)]
    assert sizes[0] - sizes[1] == sizes[1] - 200 * 2**20
