"""A whole run whose rollouts come from SGLang servers: the contract server, computing for real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab import Lab
from sglang_server import ContractServer, Model

from headrace.config import check_config
from headrace.errors import ConfigError, WeightSyncError
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun, preflight

Prepare = Callable[..., PreparedRun]
SETTINGS = ("num_steps=2", "data.eval=null", 'generator.engine="sglang"')


class Decoders:
    """Computes with the checkpoint it is pointed at, without a cache."""

    eos = 1

    def __init__(self) -> None:
        self.decoders: list[Any] = []

    def load(self, directory: Path) -> int:
        self.decoders.append(load_decoder(directory))
        return len(self.decoders) - 1

    def logits(self, weights: int, context: Sequence[tuple[int, int]]) -> np.ndarray:
        decoder, ids = self.decoders[weights], torch.tensor([token for token, _ in context])
        with torch.no_grad():
            attention = PackedCausal([len(ids)], decoder.config.windows)
            hidden = decoder(ids, positions_of([len(ids)]), attention)
            logits: np.ndarray = decoder.logits(hidden[-1:])[0].double().numpy()
        return logits


def with_urls(prepared: PreparedRun, *servers: ContractServer, **options: Any) -> PreparedRun:  # noqa: ANN401
    """Servers have their ports only once they listen."""
    config = prepared.config
    urls = tuple(server.url for server in servers)
    section = config.generator.sglang.model_copy(update={"urls": urls, **options})
    generator = config.generator.model_copy(update={"sglang": section})
    return replace(prepared, config=config.model_copy(update={"generator": generator}))


@pytest.fixture
def prepared(prepare: Prepare) -> PreparedRun:
    return prepare(*SETTINGS, 'generator.sglang.urls=["http://127.0.0.1:1"]')


def steps(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [line["metrics"] for line in found if line["kind"] == "step"]


def test_a_run_learns_from_what_its_servers_sample(prepared: PreparedRun, tmp_path: Path) -> None:
    model = Model(digests=Decoders())

    async def main() -> None:
        servers = [ContractServer(model), ContractServer(model)]
        for server in servers:
            await server.start()
        try:
            run = with_urls(prepared, *servers, weights_directory=tmp_path / "weights")
            await LocalRun(prepared=run, output=tmp_path / "run").train()
            assert all(server.bodies("/generate") for server in servers)
        finally:
            for server in servers:
                await server.die()

    asyncio.run(main())
    metrics = steps(tmp_path / "run")
    assert len(metrics) == 2
    for step in metrics:
        # The learner computes the same log-probs from its own weights: what the servers loaded is
        # what was published, and no token was changed on the way.
        assert step["learner/importance_ratio/max"] == pytest.approx(1.0, abs=1e-3)
        assert step["generator/servers/num_used"] == 2
    assert len(model.digests.decoders) == 2 * 3
    assert list((tmp_path / "weights").iterdir()) == []


def test_servers_that_are_not_there_end_the_run_with_their_names(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    run = with_urls(prepared, max_retries=0, urls=("http://127.0.0.1:1",))
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:1/server_info: ConnectError"):
        asyncio.run(LocalRun(prepared=run, output=tmp_path / "run").train())


def test_what_a_recipe_says_of_servers_reaches_the_generator(prepare: Prepare) -> None:
    from headrace.generators.sglang import SGLangGenerator  # noqa: PLC0415 - beside what it is for
    from headrace.runtime.local import _sglang_generator  # noqa: PLC0415

    prepared = prepare(
        *SETTINGS,
        'generator.on_update="keep"',
        "generator.max_concurrent_rollouts=7",
        'generator.sglang.urls=["http://one:1/", "https://two:2"]',
        'generator.sglang.weights_directory="/shared/weights"',
        "generator.sglang.rollout_deadline_seconds=1.5",
        "generator.sglang.control_deadline_seconds=2.5",
        "generator.sglang.update_deadline_seconds=3.5",
        "generator.sglang.connect_deadline_seconds=4.5",
        "generator.sglang.max_retries=5",
    )

    async def main() -> None:
        generator = _sglang_generator(prepared)
        assert isinstance(generator, SGLangGenerator)
        options = generator._calls.options
        assert options.urls == ("http://one:1", "https://two:2")
        assert options.weights_directory == Path("/shared/weights")
        assert (options.rollout_seconds, options.control_seconds) == (1.5, 2.5)
        assert (options.update_seconds, options.connect_seconds) == (3.5, 4.5)
        assert options.max_retries == 5
        assert generator._calls._slots._value == 7
        assert generator._updates._on_update == "keep"
        assert generator._http.timeout.connect == 4.5
        await generator.close()

    asyncio.run(main())


def test_the_key_comes_from_the_environment_and_is_recorded_nowhere(
    lab: Lab, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (
        *SETTINGS,
        'generator.sglang.urls=["http://one:1"]',
        'generator.sglang.api_key_variable="SGLANG_KEY_OF_A_TEST"',
    )
    monkeypatch.delenv("SGLANG_KEY_OF_A_TEST", raising=False)
    with pytest.raises(ConfigError, match="SGLANG_KEY_OF_A_TEST"):
        preflight(check_config(lab.recipe, settings)).require()
    monkeypatch.setenv("SGLANG_KEY_OF_A_TEST", "secret")

    async def main() -> None:
        from headrace.runtime.local import _sglang_generator  # noqa: PLC0415

        prepared = prepare(*settings)
        assert "secret" not in str(prepared.config)
        generator = _sglang_generator(prepared)
        assert generator._http.headers["authorization"] == "Bearer secret"
        await generator.close()

    asyncio.run(main())
