"""What the adapter is told once: where the servers are, and how long it waits for what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangOptions:
    """Where the servers are and how patient the generator is. Durations are seconds."""

    urls: tuple[str, ...]
    """``http://host:port`` of every server; all serve the same model."""
    api_key: str | None = None
    """Sent as a bearer token: what the servers were given as ``--api-key``."""
    weights_directory: Path | None = None
    """Where published weights are written for the servers to read, under the same path for them
    all; None takes a temporary directory of this machine."""
    rollout_seconds: float = 1800.0
    """One rollout may take so long on a server, times of pause not counted."""
    control_seconds: float = 60.0
    """A server answers a question, a pause or an abort within this."""
    update_seconds: float = 900.0
    """A server has loaded a published version within this."""
    connect_seconds: float = 10.0
    """A connection is made within this."""
    max_retries: int = 3
    """Times that a request is sent again to a server that still lives."""
    backoff_seconds: float = 0.5
    """Before the first repetition, doubled for each further one and drawn between half and all."""
