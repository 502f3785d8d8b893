"""What is said before a run of ranks that this model or this machine cannot have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from headrace.config import CheckedRecipe
from headrace.config.parallel_rules import described
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig
from headrace.runtime.devices import resolve_device


def rank_problems(
    recipe: CheckedRecipe, model: DecoderConfig | ForeignConfig, *, are_here: bool = True
) -> Iterator[str]:
    """Name the settings of ``learner.parallel`` that cannot be; none without ranks.

    ``are_here``: whether ranks need devices of this machine.
    """
    parallel = recipe.config.learner.parallel
    if not parallel.has_processes or not recipe.knows("learner", "parallel"):
        return
    if isinstance(model, ForeignConfig):
        yield (
            f"{described(parallel)}: a model of family {model.family} trains through "
            "transformers, in the run's own process alone; remove learner.parallel"
        )
        return
    counts = {
        "attention heads": model.num_heads,
        "key and value heads": model.num_kv_heads,
        "intermediate size": model.intermediate_size,
    }
    for what, count in counts.items():
        if count % parallel.tensor:
            yield (
                f"learner.parallel.tensor = {parallel.tensor}: it must divide the model's {count} "
                f"{what}; use {_divisors(counts.values())}"
            )
            break
    if are_here and resolve_device(recipe.config.device).type == "cuda":
        found = torch.cuda.device_count()
        if found < parallel.num_ranks:
            yield (
                f"learner.parallel of {parallel.num_ranks} ranks: each needs a CUDA device of its "
                f'own and there are {found}; lower its numbers, or use device = "cpu"'
            )


def _divisors(counts: Iterable[int]) -> str:
    """Name the numbers that divide all of ``counts``."""
    common = math.gcd(*counts)
    found = [str(number) for number in range(1, common + 1) if common % number == 0]
    return " or ".join(found)
