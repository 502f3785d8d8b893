"""A whole run on a device: what only the place of its tensors can break."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from device_runs import learned
from lab import make_lab

from headrace.config import check_config
from headrace.controller import Controller
from headrace.generators.torch_engine.cuda.runner import CudaRunner
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import preflight


def train(recipe: Path, output: Path, *settings: str, resume: bool = False) -> Controller:
    prepared = preflight(check_config(recipe, ("device=cuda", *settings))).require()
    seen: list[Controller] = []
    run = LocalRun(prepared=prepared, output=output, resume=resume)
    asyncio.run(run.train(seen.append))
    return seen[0]


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_on_the_device_and_goes_on_from_its_checkpoint(
    tmp_path: Path, dtype: str, staleness: int
) -> None:
    recipe = make_lab(tmp_path / "lab").recipe
    settings = (
        f"generator.dtype={dtype}",
        f"learner.compute_dtype={dtype}",
        f"max_staleness={staleness}",
        "checkpoint.every=2",
    )
    controller = train(recipe, tmp_path / "run", "num_steps=2", *settings)
    learner = controller._parts.learner
    assert learner._decoder.output_weight.is_cuda
    assert isinstance(controller._parts.generator._engine._engine._runner, CudaRunner)
    train(recipe, tmp_path / "run", "num_steps=4", *settings, resume=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [line for line in map(json.loads, lines) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(line["metrics"]["learner/loss/total"]) for line in steps)


@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("settings", [{}, {"objective": {"kl_coefficient": 0.1}}], ids=str)
def test_a_step_on_the_device_is_that_of_the_processor(settings: dict[str, Any]) -> None:
    found = learned("cuda", settings)
    assert found == pytest.approx(learned("cpu", settings), rel=1e-3, abs=1e-5)
