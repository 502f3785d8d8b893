"""`[placement]`: where generators live, how many there are, and when one counts as lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from headrace.config.generator import EngineName
from headrace.config.section import Section
from headrace.config.weight_sync import WeightSyncConfig

if TYPE_CHECKING:
    from headrace.config.objective_rules import Refusal


class PlacementConfig(Section):
    """Generators beside the learner or away from it; docs/POOL.md says what that changes."""

    generators: Literal["colocated", "disaggregated"] = "colocated"
    """``colocated``: one, in the learner's process. ``disaggregated``: each in a process of its
    own, started again when it is lost."""
    num_generators: int = Field(default=1, ge=1, le=1024)
    """With ``disaggregated``; `headrace scale` changes it while a run goes on."""
    threads_per_generator: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of each; null divides what the learner leaves: all of ``num_threads`` where they
    take turns, half of it where they work at the same time."""
    start_deadline_seconds: float = Field(default=300.0, gt=0.0)
    """Longest start of one, imports and the compiling of kernels included."""
    heartbeat_seconds: float = Field(default=1.0, gt=0.0)
    """Between two signs of life that one is asked for."""
    hang_seconds: float = Field(default=60.0, gt=0.0)
    """Longest wait for a sign of life; after it a generator is ended and started again."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a generator in a row, without a group of it between, before it is given up; the
    run fails with the last one. A group that as many generators were lost with fails it too."""
    backoff_seconds: float = Field(default=1.0, ge=0.0)
    """Before the first of these restarts; twice as long before each further one, at most 60."""
    save_seconds: float = Field(default=1.0, ge=0.0)
    """Between two reports of how far a generator's rollouts are, from which others go on when it is
    lost; less often where it would stand still for more than a fiftieth of the time. 0: none is
    made, and they begin again."""

    @property
    def is_disaggregated(self) -> bool:
        """Whether generators have processes of their own."""
        return self.generators == "disaggregated"


def placement_refusals(
    config: PlacementConfig, engine: EngineName, weight_sync: WeightSyncConfig
) -> Iterator[Refusal]:
    """Yield what contradicts itself."""
    if not config.is_disaggregated:
        yield from _unread(config)
        yield from _untold(weight_sync)
        return
    if engine != "torch":
        where = {
            "vllm": "vLLM has processes of its own and starts them again itself",
            "sglang": "SGLang's servers run elsewhere already, as many as generator.sglang.urls",
        }[engine]
        text = (
            f'placement.generators = "disaggregated" with generator.engine = "{engine}": {where}; '
            'use placement.generators = "colocated", or generator.engine = "torch"'
        )
        yield ("placement.generators", "generator.engine"), text
    if weight_sync.transport == "memory":
        text = (
            'weight_sync.transport = "memory" with placement.generators = "disaggregated": weights '
            'by reference stay in one process; use "auto"'
        )
        yield ("weight_sync.transport", "placement.generators"), text


def _untold(weight_sync: WeightSyncConfig) -> Iterator[Refusal]:
    """Yield what only generators elsewhere read."""
    wanted = {
        f'weight_sync.transport = "{weight_sync.transport}"': weight_sync.transport
        not in {"auto", "memory"},
        "weight_sync.delta": weight_sync.delta is not None,
    }
    for setting, is_set in wanted.items():
        if is_set:
            key = setting.partition(" ")[0]
            text = (
                f'{setting} with placement.generators = "colocated": the one generator reads the '
                'learner\'s own memory; remove it or set placement.generators = "disaggregated"'
            )
            yield (key, "placement.generators"), text


def _unread(config: PlacementConfig) -> Iterator[Refusal]:
    """Yield what only generators in processes of their own have."""
    defaults = PlacementConfig()
    for name in PlacementConfig.model_fields:
        value = getattr(config, name)
        if name != "generators" and value != getattr(defaults, name):
            text = (
                f'placement.{name} = {value:g} with placement.generators = "colocated": the one '
                "generator is in the learner's process; remove it or set placement.generators = "
                '"disaggregated"'
            )
            yield (f"placement.{name}", "placement.generators"), text
