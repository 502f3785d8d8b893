"""RunConfig: everything a run depends on, in one frozen record.

Parsed once, torch-free. Cross-section rules live here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field, field_validator

from headrace.config.alarms import AlarmConfig
from headrace.config.data import DataConfig, DynamicSamplingConfig
from headrace.config.engine_rules import engine_refusals
from headrace.config.evaluation import EvaluationConfig
from headrace.config.faults import FaultConfig
from headrace.config.generator import GeneratorConfig, SamplingConfig
from headrace.config.learner import LearnerConfig
from headrace.config.model import ModelConfig
from headrace.config.monitor import CheckpointConfig, MonitorConfig
from headrace.config.objective import BEYOND_GROUPS, OBJECTIVES, ObjectiveConfig, table_of
from headrace.config.objective_rules import ObjectiveSetting, objective_refusals
from headrace.config.parallel_rules import parallel_refusals
from headrace.config.pipeline import PipelineConfig
from headrace.config.placement import PlacementConfig, placement_refusals
from headrace.config.section import Section
from headrace.config.verifier import VerifierConfig
from headrace.config.weight_sync import WeightSyncConfig, weight_sync_refusals
from headrace.types import num_batches_within

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]


class RunConfig(Section):
    """A recipe, resolved."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the default output directory ``runs/NAME``."""
    seed: int = Field(default=0, ge=0)
    """Root of the seed tree."""
    num_steps: int | None = Field(default=None, ge=1)
    """Training steps; null when ``num_epochs`` says how long."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the prompts; the last batch may be short."""
    groups_per_step: int = Field(default=8, ge=1)
    """Prompts whose groups make one batch."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each prompt."""
    max_staleness: int = Field(default=0, ge=0)
    """The bound eta on staleness, in optimizer steps; 0 is synchronous."""
    pipeline: PipelineConfig = PipelineConfig()
    """What is generated ahead of the learner, within that bound."""
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of generator and learner; null takes every core."""
    device: DeviceName = "auto"
    """Where learner and torch engine compute. ``auto``: on a CUDA device if there is one."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Prompts."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Draw another prompt for every group whose rewards have no spread; null trains on what
    comes."""
    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""
    generator: GeneratorConfig = GeneratorConfig()
    """The engine."""
    verifier: VerifierConfig
    """The reward."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss: a table, or the name of one as in `OBJECTIVES`."""
    learner: LearnerConfig = LearnerConfig()
    """The update."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How new weights get from the learner to the generators."""
    placement: PlacementConfig = PlacementConfig()
    """Where generators live."""
    eval: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    faults: FaultConfig = FaultConfig()
    """What is started again when it dies."""
    monitors: MonitorConfig = MonitorConfig()
    """Output."""
    alarms: AlarmConfig = AlarmConfig()
    """Signs of rewards earned in another way than was meant."""

    @field_validator("objective", mode="before")
    @classmethod
    def _named_objective(cls, value: object) -> object:
        return table_of("objective", value, OBJECTIVES)

    @property
    def eval_is_interleaved(self) -> bool:
        """Whether training goes on beside an evaluation."""
        return self.max_staleness > 0 if self.eval.interleaved is None else self.eval.interleaved

    @property
    def num_batches(self) -> int:
        """Batches that are under way at most; from two on the learner steps while it publishes."""
        within = num_batches_within(self.max_staleness, self.learner.num_minibatches)
        return min(self.pipeline.depth or within, within)

    @property
    def copies_weights(self) -> bool:
        """Whether a generator in the learner's process reads copies, beside which that steps."""
        return self.num_batches > 1 and not self.placement.is_disaggregated

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling of the held-out evaluation."""
        return self.eval.sampling or self.sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Settings that are each allowed and cannot be meant together."""

    keys: tuple[str, ...]
    """The dotted keys it rests on."""
    text: str
    """One line: the keys and values, why not, and what to do."""


def contradictions(config: RunConfig) -> Iterator[Contradiction]:
    """Yield every set of settings that cannot be meant together."""
    if (config.num_steps is None) == (config.num_epochs is None):
        yield Contradiction(
            keys=("num_steps", "num_epochs"),
            text="num_steps, num_epochs: give exactly one of them, to say how long to train",
        )
    yield from _data_contradictions(config)
    yield from _staleness_contradictions(config)
    yield from _pipeline_contradictions(config)
    yield from _refill_contradictions(config)
    yield from _alarm_contradictions(config)
    setting = ObjectiveSetting(
        objective=config.objective,
        sampling=config.sampling,
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        num_minibatches=config.learner.num_minibatches,
        max_staleness=config.max_staleness,
    )
    for keys, text in objective_refusals(setting):
        yield Contradiction(keys=keys, text=text)
    for keys, text in parallel_refusals(config.learner):
        yield Contradiction(keys=keys, text=text)
    for keys, text in weight_sync_refusals(config.weight_sync):
        yield Contradiction(keys=keys, text=text)
    placed = placement_refusals(config.placement, config.generator.engine, config.weight_sync)
    for keys, text in placed:
        yield Contradiction(keys=keys, text=text)
    sampling = {"sampling": config.sampling}
    if config.eval.sampling is not None:
        sampling["eval.sampling"] = config.eval.sampling
    for keys, text in engine_refusals(config.generator, sampling):
        yield Contradiction(keys=keys, text=text)


def _data_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    if config.data.template == "raw" and config.data.system_prompt is not None:
        yield Contradiction(
            keys=("data.system_prompt", "data.template"),
            text='data.system_prompt: needs data.template = "chat"; "raw" has no system turn',
        )
    if "{prompt}" not in config.data.user_template:
        yield Contradiction(
            keys=("data.user_template",),
            text="data.user_template: must contain {prompt}, or every row would read the same",
        )


def _staleness_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    minibatches, bound = config.learner.num_minibatches, config.max_staleness
    if minibatches - 1 > bound:
        yield Contradiction(
            keys=("learner.num_minibatches", "max_staleness"),
            text=f"learner.num_minibatches = {minibatches} with max_staleness = {bound}: the last "
            f"minibatch is {minibatches - 1} updates stale; set max_staleness >= "
            f"{minibatches - 1} or num_minibatches = {bound + 1}",
        )
    if minibatches > config.groups_per_step:
        yield Contradiction(
            keys=("learner.num_minibatches", "groups_per_step"),
            text=f"learner.num_minibatches = {minibatches} with groups_per_step = "
            f"{config.groups_per_step}: a minibatch needs at least one group",
        )


def _alarm_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    drift, components = config.alarms.drift, config.verifier.components
    if drift is not None and drift.component is not None and drift.component not in components:
        yield Contradiction(
            keys=("alarms.drift.component", "verifier.components"),
            text=f'alarms.drift.component = "{drift.component}": no component of the verifier; '
            f"allowed: {', '.join(sorted(components))}",
        )


def _pipeline_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    pipeline, bound = config.pipeline, config.max_staleness
    updates = config.learner.num_minibatches
    if updates - 1 > bound:
        return  # told already
    within = num_batches_within(bound, updates)
    keys = ("max_staleness", "learner.num_minibatches")
    if pipeline.depth is not None and pipeline.depth > within:
        yield Contradiction(
            keys=("pipeline.depth", *keys),
            text=f"pipeline.depth = {pipeline.depth} with max_staleness = {bound} and "
            f"learner.num_minibatches = {updates}: the last of so many batches would be staler; "
            f"set depth = {within}, or max_staleness >= {pipeline.depth * updates - 1}",
        )
    if pipeline.late == "carry_over" and config.num_batches == 1:
        yield Contradiction(
            keys=("pipeline.late", "pipeline.depth", *keys),
            text='pipeline.late = "carry_over" with one batch under way: there is no later one '
            f"that could take what is late; set max_staleness >= {2 * updates - 1} and leave "
            "pipeline.depth out",
        )
    if config.eval.interleaved and bound == 0:
        yield Contradiction(
            keys=("eval.interleaved", "max_staleness"),
            text="eval.interleaved = true with max_staleness = 0: a synchronous run is the same "
            "every time, and what is evaluated beside it would depend on the clock; set "
            "max_staleness >= 1 or leave eval.interleaved out",
        )
    if (pipeline.late == "cancel") != (pipeline.surplus_groups > 0):
        yield Contradiction(
            keys=("pipeline.late", "pipeline.surplus_groups"),
            text=f'pipeline.late = "{pipeline.late}" with pipeline.surplus_groups = '
            f'{pipeline.surplus_groups}: only "cancel" gives groups up, and it gives up as many as '
            "are drawn beyond groups_per_step; set both or neither",
        )


def _refill_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    if config.dynamic_sampling is None:
        return
    if config.group_size == 1:
        yield Contradiction(
            keys=("dynamic_sampling", "group_size"),
            text="dynamic_sampling with group_size = 1: a group of one never has a spread, so no "
            "batch would come together; use group_size >= 2 or remove dynamic_sampling",
        )
    elif config.objective.advantage in BEYOND_GROUPS:
        yield Contradiction(
            keys=("dynamic_sampling", "objective.advantage"),
            text=f'dynamic_sampling with objective.advantage = "{config.objective.advantage}": '
            "rewards are not compared within their group, so one without a spread teaches as much "
            "as another; remove dynamic_sampling or use an estimator of groups",
        )
