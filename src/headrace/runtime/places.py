"""Where generators and verifiers live: the one thing in which runtimes differ.

A run builds all else itself, and does not know which of these it was given.
"""

from __future__ import annotations

from typing import Protocol

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.roles import Verifier
from headrace.runtime.generators import build_generator
from headrace.runtime.preflight import PreparedModel
from headrace.verifiers import build_verifier
from headrace.waves import PausableGenerator


class Places(Protocol):
    """Builds what a runtime places. Whoever asks for a role closes it."""

    def generator(
        self, config: RunConfig, model: PreparedModel, compute: ComputeThread
    ) -> PausableGenerator:
        """Return the generator of a run; it holds no weights until the first are published.

        ``compute``: cores of this machine, for a generator that is here.
        """
        ...

    def verifier(self, config: RunConfig) -> Verifier:
        """Return the verifier of a run."""
        ...


class LocalPlaces:
    """This process, and others of this machine."""

    def generator(
        self, config: RunConfig, model: PreparedModel, compute: ComputeThread
    ) -> PausableGenerator:
        """See `Places`."""
        return build_generator(config, model, compute)

    def verifier(self, config: RunConfig) -> Verifier:
        """See `Places`."""
        return build_verifier(config.verifier, window=window_of(config))


def window_of(config: RunConfig) -> int:
    """Return the rollouts that the share of unscored ones is taken over: those of a batch."""
    return config.groups_per_step * config.group_size
