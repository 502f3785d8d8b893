"""What the servers that a recipe names say of themselves, before a run relies on them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.config import RemoteConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.verifiers.remote.executor import EndpointReport

SERVE_REMEDY = "pip install -c constraints.txt -e '.[serve]' in the source folder"
_KEY = "verifier.remote"


def remote_findings(
    config: RemoteConfig, environ: Mapping[str, str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Ask every endpoint how it is; return problems and notes.

    An endpoint that is down is a note while another one can be used: it may come back. One that
    answers and cannot serve is a problem, since time will not heal it.
    """
    if importlib.util.find_spec("httpx2") is None:
        return [f"{_KEY}: httpx2 is not installed in this environment; {SERVE_REMEDY}"], []
    from headrace.verifiers.remote.executor import remote_token  # noqa: PLC0415 - needs httpx2

    try:
        token = remote_token(config, environ)
    except ConfigError as error:
        return error.problems, []
    reports = asyncio.run(_reports(config, token))
    none_is_well = all(report.trouble for report in reports)
    problems, notes = list[str](), list[str]()
    for report in reports:
        if report.is_unfit:
            problems.append(f"{_KEY}.endpoints: {report.trouble}")
        elif report.trouble and none_is_well:
            problems.append(
                f"{_KEY}.endpoints: {report.trouble}; start `headrace serve-verifiers` there"
            )
        elif report.trouble:
            notes.append(f"{_KEY}.endpoints: {report.trouble}; the others are used meanwhile")
    return problems, notes


async def _reports(config: RemoteConfig, token: str | None) -> Sequence[EndpointReport]:
    from headrace.verifiers.remote.executor import RemoteExecutor  # noqa: PLC0415 - needs httpx2

    executor = RemoteExecutor(config, token)
    try:
        return await executor.examine()
    finally:
        await executor.close()
