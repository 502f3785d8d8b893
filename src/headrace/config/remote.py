"""`[verifier.remote]`: servers that run what is to be run in isolation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from headrace.config.section import Section
from headrace.config.server_url import ServerUrl


class RemoteConfig(Section):
    """Where `headrace serve-verifiers` runs, and what is demanded of it; docs/SERVE.md."""

    endpoints: tuple[ServerUrl, ...] = Field(min_length=1)
    """Its addresses. A job goes to the one with the fewest open ones."""
    token_env: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the servers' token; the token itself appears in no recipe and
    no run directory."""
    minimum_tier: Literal["cell", "bubblewrap", "lock"] = "lock"
    """The weakest isolation that is accepted. An endpoint that offers less is not used, and what it
    answers all the same is not scored."""
    max_open_jobs: int = Field(default=64, ge=1)
    """Jobs that wait for an answer, over all endpoints; the others wait here."""
    max_tries: int = Field(default=4, ge=1)
    """Tries of one job before it is not scored. To be turned away by a full queue is none."""
    queue_seconds: float = Field(default=60.0, gt=0.0)
    """Longest that one try waits beyond the job's own wall clock limit."""
    patience_seconds: float = Field(default=180.0, gt=0.0)
    """Longest that all tries together wait beyond it; then the job is not scored."""
    health_seconds: float = Field(default=5.0, gt=0.0)
    """Longest wait for a connection, and for an endpoint to say how it is."""

    @field_validator("endpoints", mode="after")
    @classmethod
    def _each_once(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        twice = [url for url in dict.fromkeys(endpoints) if endpoints.count(url) > 1]
        if twice:
            msg = f"verifier.remote.endpoints: {', '.join(twice)} is there twice; name each once"
            raise ValueError(msg)
        return endpoints
