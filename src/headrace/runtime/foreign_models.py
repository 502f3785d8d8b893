"""What is said before a run of a model that transformers computes and the decoder does not."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config import CheckedRecipe, RunConfig
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig


def foreign_note(config: ForeignConfig) -> str:
    """Say which way the model takes, and what that costs."""
    return (
        f"model_type {config.family!r} is none of the families that headrace computes: learner and "
        "torch engine run it through transformers' AutoModelForCausalLM, without a cache and "
        "without shared prompts. Right, and slow; see docs/LEARNER.md"
    )


def foreign_problems(recipe: CheckedRecipe, config: DecoderConfig | ForeignConfig) -> Iterator[str]:
    """Name the settings that such a model cannot have. None for a model of the decoder's."""
    if not isinstance(config, ForeignConfig):
        return
    engine = recipe.config.generator.engine
    if engine != "torch" and recipe.knows("generator", "engine"):
        yield (
            f'generator.engine = "{engine}": a model of family {config.family} trains through '
            'transformers, and only "torch" samples it with the weights of that; use "torch"'
        )
    learner = recipe.config.learner
    if learner.activation_checkpointing and recipe.knows("learner", "activation_checkpointing"):
        yield (
            "learner.activation_checkpointing = true: a model of family "
            f"{config.family} trains through transformers, which does this in training mode alone; "
            "set it to false and lower max_tokens_per_microbatch: passes are recomputed whole"
        )
    if learner.lora is not None and recipe.knows("learner", "lora"):
        yield (
            f"learner.lora: a model of family {config.family} trains through transformers, where "
            "all weights are trained; leave it out"
        )


def foreign_bytes(config: RunConfig, model: ForeignConfig) -> int:
    """Return about how much the weights need alone: masters, gradients, moments and copies."""
    return 4 * (5 + (config.objective.kl_coefficient > 0)) * model.num_parameters
