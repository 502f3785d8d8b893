"""How the cores are divided where generators have processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config import RunConfig


def learner_threads(config: RunConfig, num_threads: int) -> int:
    """Return the cores of the learner: all where it takes turns with generators, else half."""
    return num_threads if config.max_staleness == 0 else max(1, num_threads // 2)


def threads_of_each(config: RunConfig, num_threads: int) -> int:
    """Return the cores of each generator: what the recipe says, or its part of what is left."""
    placement = config.placement
    if placement.threads_per_generator is not None:
        return placement.threads_per_generator
    beside = 0 if config.max_staleness == 0 else learner_threads(config, num_threads)
    return max(1, (num_threads - beside) // placement.num_generators)


def core_notes(config: RunConfig, num_cores: int) -> Iterator[str]:
    """Say where more threads compute at the same time than there are cores."""
    if not config.placement.is_disaggregated:
        return
    num_threads, count = config.num_threads or num_cores, config.placement.num_generators
    each, learner = threads_of_each(config, num_threads), learner_threads(config, num_threads)
    is_asynchronous = config.max_staleness > 0
    together = count * each + (learner if is_asynchronous else 0)
    if together > num_cores:
        others = f" and {learner} of the learner" if is_asynchronous else ""
        yield (
            f"placement.num_generators = {count} with {each} threads each{others} are {together} "
            f"threads at the same time, and this machine has {num_cores} cores: they wait for each "
            "other; lower placement.num_generators or placement.threads_per_generator"
        )
