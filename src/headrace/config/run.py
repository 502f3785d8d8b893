"""RunConfig: everything a run depends on, in one frozen record.

Parsed once, torch-free. Cross-section rules live here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pydantic import Field

from headrace.config.data import DataConfig
from headrace.config.engine_rules import engine_refusals
from headrace.config.evaluation import EvaluationConfig
from headrace.config.generator import GeneratorConfig, SamplingConfig
from headrace.config.learner import LearnerConfig, ObjectiveConfig
from headrace.config.model import ModelConfig
from headrace.config.monitor import CheckpointConfig, MonitorConfig
from headrace.config.section import Section
from headrace.config.verifier import VerifierConfig

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
    num_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of generator and learner; null takes every core."""
    device: DeviceName = "auto"
    """Where learner and torch engine compute. ``auto``: on a CUDA device if there is one."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Prompts."""
    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""
    generator: GeneratorConfig = GeneratorConfig()
    """The engine."""
    verifier: VerifierConfig
    """The reward."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    learner: LearnerConfig = LearnerConfig()
    """The update."""
    eval: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    monitors: MonitorConfig = MonitorConfig()
    """Output."""

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
    yield from _objective_contradictions(config)
    yield from _staleness_contradictions(config)
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


def _objective_contradictions(config: RunConfig) -> Iterator[Contradiction]:
    advantage, sampling = config.objective.advantage, config.sampling
    if config.group_size == 1:
        yield Contradiction(
            keys=("group_size", "objective.advantage"),
            text=f'group_size = 1 with objective.advantage = "{advantage}": a group of one has no '
            "spread, so nothing could be learned; use group_size >= 2",
        )
    if sampling.temperature == 0.0:
        yield Contradiction(
            keys=("sampling.temperature",),
            text="sampling.temperature = 0: every rollout of a group would be the same; train "
            "with a temperature above 0 (eval.greedy measures greedy decoding)",
        )
    yield from _correction_contradictions(config.objective)
    yield from _support_contradictions(sampling, config.objective)


def _correction_contradictions(objective: ObjectiveConfig) -> Iterator[Contradiction]:
    correction, bound = objective.correction, objective.correction_bound
    if correction != "none" and objective.proximal == "generator":
        yield Contradiction(
            keys=("objective.correction", "objective.proximal"),
            text=f'objective.correction = "{correction}" with objective.proximal = "generator": '
            "the proximal log-probs would be the generator's own and every weight 1; set "
            'objective.proximal = "recompute" or objective.correction = "none"',
        )
    if correction == "none" and bound != ObjectiveConfig().correction_bound:
        yield Contradiction(
            keys=("objective.correction_bound", "objective.correction"),
            text=f'objective.correction_bound = {bound:g} with objective.correction = "none": '
            'nothing reads this bound; remove it or set objective.correction = "tis"',
        )


def _support_contradictions(
    sampling: SamplingConfig, objective: ObjectiveConfig
) -> Iterator[Contradiction]:
    """Say which settings leave the generator fewer tokens than the learner sums over.

    That biases whatever compares the two: a ratio to the generator's log-probs, or a weight.
    """
    value: str
    if objective.correction != "none":
        key, value, what, instead = "correction", objective.correction, "weights", "none"
    elif objective.proximal == "generator":
        key, value, what, instead = "proximal", objective.proximal, "ratio", "recompute"
    else:
        return
    filters, masks = ("top_p", "top_k", "min_p"), ("allowed_token_ids", "banned_token_ids")
    params = sampling.params(())
    biased = (
        f'with objective.{key} = "{value}": the learner\'s log-probs cover the whole vocabulary '
        f"and the generator's only the tokens that could be sampled, so the {what} would be "
        f'biased; sample without them or set objective.{key} = "{instead}"'
    )
    # Without a model its end-of-sequence ids are not known, and min_tokens is there to ban them.
    for names, is_on in (
        (filters, params.truncates),
        (("min_tokens", *masks), params.masks or params.min_tokens > 0),
    ):
        if is_on:
            keys = tuple(f"sampling.{name}" for name in names)
            yield Contradiction(
                keys=(*keys, f"objective.{key}"), text=f"sampling.{', '.join(names)} {biased}"
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
    objective = config.objective
    is_unweighted = objective.proximal == "recompute" and objective.correction == "none"
    if is_unweighted and bound > minibatches - 1:
        yield Contradiction(
            keys=(
                "objective.proximal",
                "objective.correction",
                "max_staleness",
                "learner.num_minibatches",
            ),
            text='objective.proximal = "recompute" and objective.correction = "none" with '
            f"max_staleness = {bound} and learner.num_minibatches = {minibatches}: rollouts of "
            "older policies would be trained on as if they were new, since nothing weighs them "
            'against the policy that sampled them; set objective.correction = "tis", '
            f'max_staleness = {minibatches - 1} or objective.proximal = "generator"',
        )
    if minibatches > config.groups_per_step:
        yield Contradiction(
            keys=("learner.num_minibatches", "groups_per_step"),
            text=f"learner.num_minibatches = {minibatches} with groups_per_step = "
            f"{config.groups_per_step}: a minibatch needs at least one group",
        )
