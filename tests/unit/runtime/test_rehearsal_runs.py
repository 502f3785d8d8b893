"""When a run tries its largest micro-batch, and what becomes of one that does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import RunError
from headrace.learners import TorchLearner
from headrace.runtime.local import LocalRun
from headrace.runtime.preflight import PreparedRun

SHORT = ("num_steps=1", "groups_per_step=2", "group_size=2", "device=cpu")


@pytest.mark.parametrize(("setting", "count"), [("auto", 0), ("never", 0), ("always", 1)])
def test_a_processor_rehearses_where_it_is_told_to_with_the_longest_prompt(
    setting: str,
    count: int,
    prepare: Callable[..., PreparedRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    really = TorchLearner.rehearse

    async def rehearse(self: TorchLearner, longest_prompt: int) -> None:
        seen.append(longest_prompt)
        await really(self, longest_prompt)

    monkeypatch.setattr(TorchLearner, "rehearse", rehearse)
    prepared = prepare(*SHORT, f"learner.rehearsal={setting}")
    outcome = asyncio.run(LocalRun(prepared=prepared, output=tmp_path / "run").train())
    assert outcome.num_steps_done == 1
    assert seen == [max(len(p.token_ids) for p in prepared.train.prompts)] * count


def test_a_run_whose_largest_microbatch_does_not_fit_ends_before_its_first_rollout(
    prepare: Callable[..., PreparedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        message = "out of memory"
        raise RuntimeError(message)

    monkeypatch.setattr(TorchLearner, "_read", refuse)
    prepared = prepare(*SHORT, "learner.rehearsal=always")
    with pytest.raises(RunError, match="does not fit in memory"):
        asyncio.run(LocalRun(prepared=prepared, output=tmp_path / "run").train())
    assert not list((tmp_path / "run" / "rollouts").glob("*.parquet"))
