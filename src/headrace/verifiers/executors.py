"""Which executor runs what completions hold: the sandbox of this machine, or servers."""

from __future__ import annotations

import os

from headrace.config import VerifierConfig
from headrace.verifiers.sandbox.execution import Executor


def build_executor(config: VerifierConfig) -> Executor:
    """Return the executor that ``config`` names. Blocks for less than a second, to try a tier.

    Raises ConfigError where code cannot be isolated as asked, or a server's token is missing.
    """
    if config.remote is not None:
        from headrace.verifiers.remote.executor import (  # noqa: PLC0415 - an extra
            RemoteExecutor,
            remote_token,
        )

        return RemoteExecutor(config.remote, remote_token(config.remote, os.environ))
    from headrace.verifiers.sandbox import tiers  # noqa: PLC0415 - Linux alone can import it

    return tiers.build_executor(config.sandbox)
