"""Where generators, verifiers and the learner's ranks live: the one thing in which runtimes differ.

A run builds all else itself, and does not know which of these it was given.
"""

from __future__ import annotations

from typing import Protocol

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.generators.pool import ChildLauncher
from headrace.learners.parallel.hosts import LocalHosts, RankHosts
from headrace.roles import Verifier
from headrace.runtime.cores import threads_of_each
from headrace.runtime.generator_room import bytes_of_each
from headrace.runtime.generators import (
    RunGenerator,
    build_generator,
    build_pool,
)
from headrace.runtime.preflight import PreparedModel
from headrace.verifiers import build_verifier
from headrace.waves import PausableGenerator
from headrace.weight_sync import WeightChannel, build_weight_channel


class Places(Protocol):
    """Builds what a runtime places. Whoever asks for a role or a channel closes it."""

    def channel(self, config: RunConfig, compute: ComputeThread) -> WeightChannel | None:
        """Return what carries weights to generators elsewhere; None where the learner's are theirs.

        ``compute``: where the learner computes.
        """
        ...

    def generator(
        self,
        config: RunConfig,
        model: PreparedModel,
        compute: ComputeThread,
        channel: WeightChannel | None,
    ) -> PausableGenerator:
        """Return the generator of a run; it holds no weights until the first are published.

        ``compute``: cores of this machine, for a generator that is here.
        """
        ...

    def verifier(self, config: RunConfig) -> Verifier:
        """Return the verifier of a run."""
        ...

    def rank_hosts(self, config: RunConfig, compute: ComputeThread) -> RankHosts:
        """Return where the ranks of one life of a learner run; the learner closes it.

        ``compute``: cores of this machine, for ranks that are here.
        """
        ...


class LocalPlaces:
    """This process, and others of this machine."""

    def channel(self, config: RunConfig, compute: ComputeThread) -> WeightChannel | None:
        """See `Places`."""
        if not config.placement.is_disaggregated:
            return None
        return build_weight_channel(config.weight_sync, compute)

    def generator(
        self,
        config: RunConfig,
        model: PreparedModel,
        compute: ComputeThread,
        channel: WeightChannel | None,
    ) -> PausableGenerator:
        """See `Places`."""
        if channel is None:
            return build_generator(config, model, compute)
        assert config.num_threads is not None, "a run fills it in"
        spec = RunGenerator(
            config=config,
            model_directory=model.directory,
            num_threads=threads_of_each(config, config.num_threads),
            reader=channel.reader,
        )
        deadline = config.placement.start_deadline_seconds
        launcher = ChildLauncher(spec, deadline_seconds=deadline)
        return build_pool(config, launcher, channel, member_bytes=bytes_of_each(config, model))

    def verifier(self, config: RunConfig) -> Verifier:
        """See `Places`."""
        return build_verifier(config.verifier, window=window_of(config))

    def rank_hosts(self, config: RunConfig, compute: ComputeThread) -> RankHosts:
        """See `Places`."""
        return local_hosts(config, compute)


def local_hosts(config: RunConfig, compute: ComputeThread) -> LocalHosts:
    """Return this machine, of whose cores each rank has its part of those of ``compute``."""
    return LocalHosts(num_threads=max(1, compute.num_threads // config.learner.parallel.num_ranks))


def window_of(config: RunConfig) -> int:
    """Return the rollouts that the share of unscored ones is taken over: those of a batch."""
    return config.groups_per_step * config.group_size
