"""A whole run whose rollouts come from SGLang servers: the contract server, computing for real."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeMonitor
from lab import Lab
from sglang_server import ContractServer, Model

from headrace.config import check_config
from headrace.errors import ConfigError, WeightSyncError
from headrace.models.attention import PackedCausal, positions_of
from headrace.models.checkpoint import load_decoder
from headrace.runtime.diagnosis import diagnose
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun, preflight
from headrace.types import StepRecord

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


def train(
    prepared: PreparedRun,
    output: Path,
    *,
    num_servers: int = 2,
    resume: bool = False,
    monitors: tuple[FakeMonitor, ...] = (),
) -> Model:
    """Train with servers of its own; return what computed in them."""
    model = Model(digests=Decoders())

    async def main() -> None:
        servers = [ContractServer(model) for _ in range(num_servers)]
        for server in servers:
            await server.start()
        try:
            run = with_urls(prepared, *servers, weights_directory=output.parent / "weights")
            local = LocalRun(prepared=run, output=output, resume=resume, extra_monitors=monitors)
            await local.train()
            assert all(server.bodies("/generate") for server in servers)
        finally:
            for server in servers:
                await server.die()

    asyncio.run(main())
    return model


def test_a_run_learns_from_what_its_servers_sample_and_resumes_with_others(
    prepared: PreparedRun, prepare: Prepare, tmp_path: Path
) -> None:
    model = train(prepared, tmp_path / "run")
    assert len(model.digests.decoders) == 2 * 3
    longer = prepare(*SETTINGS, "num_steps=3", 'generator.sglang.urls=["http://127.0.0.1:1"]')
    train(longer, tmp_path / "run", num_servers=1, resume=True)
    metrics = steps(tmp_path / "run")
    assert [step["generator/servers/num_used"] for step in metrics] == [2, 2, 1]
    for step in metrics:
        # The learner computes the same log-probs from its own weights: what the servers loaded is
        # what was published, and no token was changed on the way.
        assert step["learner/importance_ratio/max"] == pytest.approx(1.0, abs=1e-3)
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("on_update", ["wait", "keep", "recompute", "restart"])
def test_a_run_ahead_of_its_learner_ends_within_its_bound(
    prepare: Prepare, tmp_path: Path, on_update: str
) -> None:
    records: list[StepRecord] = []
    prepared = prepare(
        'generator.engine="sglang"',
        'generator.sglang.urls=["http://127.0.0.1:1"]',
        f"generator.on_update={on_update}",
        "data.eval=null",
        "num_steps=4",
        "groups_per_step=2",
        "max_staleness=2",
    )
    train(prepared, tmp_path / "run", monitors=(FakeMonitor(on_each_step=records.append),))
    assert len(records) == 4
    staleness = [record.metrics["learner/staleness/max"] for record in records]
    assert max(staleness) <= 2
    assert max(staleness) > 0 or on_update != "wait", "or nothing ran ahead"


def test_servers_that_are_not_there_end_the_run_with_their_names(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    run = with_urls(prepared, max_retries=0, urls=("http://127.0.0.1:1",))
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:1/server_info: ConnectError"):
        asyncio.run(LocalRun(prepared=run, output=tmp_path / "run").train())


def test_what_a_recipe_says_of_servers_reaches_the_generator(prepare: Prepare) -> None:
    from headrace.generators.sglang import SGLangGenerator  # noqa: PLC0415 - beside what it is for
    from headrace.runtime.generators import _sglang_generator  # noqa: PLC0415

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
        generator = _sglang_generator(prepared.config.generator, prepared.model)
        assert isinstance(generator, SGLangGenerator)
        options = generator._calls.options
        assert options == prepared.config.generator.sglang
        assert options.urls == ("http://one:1", "https://two:2")
        assert generator._weights._parent == Path("/shared/weights")
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
    for unsendable in ("secret\n", "sec ret", "secr\u00e9t"):
        monkeypatch.setenv("SGLANG_KEY_OF_A_TEST", unsendable)
        with pytest.raises(ConfigError, match="character that no HTTP header takes") as caught:
            preflight(check_config(lab.recipe, settings)).require()
        assert "secr" not in str(caught.value)
    monkeypatch.setenv("SGLANG_KEY_OF_A_TEST", "secret")

    async def main() -> None:
        from headrace.runtime.generators import _sglang_generator  # noqa: PLC0415

        prepared = prepare(*settings)
        assert "secret" not in str(prepared.config)
        generator = _sglang_generator(prepared.config.generator, prepared.model)
        assert generator._http.headers["authorization"] == "Bearer secret"
        await generator.close()

    asyncio.run(main())


def test_the_doctor_says_whether_the_client_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[bool, str]:
        (line,) = (finding for finding in diagnose() if finding.name == "engine sglang")
        return line.present, line.remedy

    assert found() == (True, "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    present, remedy = found()
    assert not present
    assert "install headrace[sglang]" in remedy


def test_a_recipe_is_refused_where_the_client_is_not_installed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "httpx2" else find(name, *a)
    )
    settings = (*SETTINGS, 'generator.sglang.urls=["http://one:1"]')
    with pytest.raises(ConfigError, match='engine = "sglang": httpx2 is not installed'):
        preflight(check_config(lab.recipe, settings)).require()
