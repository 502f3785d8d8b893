"""One training run of `bench async`: the program of a process of its own.

Run as ``python -m headrace.bench.async_run RECIPE OUTPUT SECONDS KEY=VALUE...``. It is `headrace
train` but for two things. The verdicts of a group are there later, by up to SECONDS and at least a
tenth of that, as those of programs, judges and reward models are that run elsewhere; how long is a
function of the group's id alone, so every run that is compared meets the same delays. And with
``uncorrected`` among the settings the objective loses its correction once everything was checked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.async_learning import UNCORRECTED
from headrace.config import CorrectionConfig, RunConfig, check_config
from headrace.roles import Verifier
from headrace.types import RolloutGroup, Verdict, derive_seed

if TYPE_CHECKING:
    from headrace.runtime.preflight import PreparedRun

_SPREAD = 10.0


def delay_seconds(group_id: str, longest: float) -> float:
    """Return how long the verdicts of a group take: log-uniform from a tenth of ``longest``."""
    share = derive_seed(0, "delay", group_id) / 2**63
    return longest * math.exp((share - 1.0) * math.log(_SPREAD))


class DelayedVerifier:
    """Another verifier's verdicts, later. Whoever waits for them computes nothing."""

    def __init__(self, verifier: Verifier, longest_seconds: float) -> None:
        self._verifier = verifier
        self._longest = longest_seconds

    async def score(self, group: RolloutGroup) -> tuple[Verdict, ...]:
        """See `Verifier`."""
        later = asyncio.sleep(delay_seconds(group.group_id, self._longest))
        verdicts, _ = await asyncio.gather(self._verifier.score(group), later)
        return verdicts

    def metrics(self) -> Mapping[str, float]:
        """See `Verifier`."""
        return self._verifier.metrics()

    async def close(self) -> None:
        """See `Verifier`."""
        await self._verifier.close()


def uncorrected(prepared: PreparedRun) -> PreparedRun:
    """Return the run without what weighs its tokens against the policy that sampled them."""
    config = prepared.config
    objective = config.objective.model_copy(update={"correction": CorrectionConfig()})
    return dataclasses.replace(prepared, config=config.model_copy(update={"objective": objective}))


def main(recipe: str, output: str, seconds: str, *settings: str) -> None:
    """Train ``recipe`` into ``output``."""
    from headrace.runtime.local import LocalRun
    from headrace.runtime.places import LocalPlaces
    from headrace.runtime.preflight import preflight

    class DelayedPlaces(LocalPlaces):
        """Everything of the run is where it would be; its verdicts come later."""

        def verifier(self, config: RunConfig) -> Verifier:
            return DelayedVerifier(super().verifier(config), float(seconds))

    overrides = [setting for setting in settings if setting != UNCORRECTED]
    prepared = preflight(check_config(Path(recipe), overrides)).require()
    if UNCORRECTED in settings:
        prepared = uncorrected(prepared)
    run = LocalRun(prepared=prepared, output=Path(output), places=DelayedPlaces())
    asyncio.run(run.train())


if __name__ == "__main__":
    main(*sys.argv[1:])
