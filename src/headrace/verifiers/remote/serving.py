"""A process that serves an executor until it is told to end.

Owns: no address beyond this machine is bound without a token; SIGTERM and SIGINT let what runs come
to its end, within a bound, and then everything is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headrace.config.sglang_rules import is_api_key
from headrace.errors import ConfigError
from headrace.verifiers.remote.connections import BoundedConnection
from headrace.verifiers.remote.desk import DeskLimits, JobDesk
from headrace.verifiers.remote.server import Gate, build_app
from headrace.verifiers.sandbox.execution import Executor, Tier

KEEP_ALIVE_SECONDS = 75
"""Longer than the client keeps an idle connection, so that it is the client that ends one."""
_MIN_TOKEN_CHARACTERS = 16
_BACKLOG = 512
_SPARE_CONNECTIONS = 256
"""Beside those of jobs: idle ones, health and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how much is served."""

    host: str
    port: int
    """0 takes a free one."""
    token: str | None
    limits: DeskLimits
    drain_seconds: int
    """For what runs when the process is told to end; afterwards it is ended."""
    certificate: Path | None = None
    """PEM; with it the address speaks HTTPS."""
    key: Path | None = None
    """PEM of ``certificate``; None where that holds it too."""
    on_ready: Callable[[str], None] = field(default=lambda _: None)
    """Gets the URL once it answers."""


def read_token(
    *, file: Path | None, variable: str | None, environ: Mapping[str, str]
) -> str | None:
    """Return the token in ``file`` or in an environment variable; None if neither is named.

    Raises ConfigError where both are, or where what is there is no token. Never quotes it.
    """
    if file is not None and variable is not None:
        msg = f"--token-file {file} with --token-env {variable}: give one of them"
        raise ConfigError(msg)
    if file is not None:
        return _checked_token(f"--token-file {file}", _read(file))
    if variable is not None:
        return _checked_token(f"--token-env {variable}", environ.get(variable, ""))
    return None


def serve(executor: Executor, tier: Tier, options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT, and close ``executor``. Raises ConfigError before it begins.

    For the main thread alone: it is the only one that Python hands signals to.
    """
    check_certificate(options)
    with listening(options) as listener, _ends_quietly():
        asyncio.run(_serve(executor, tier, options, listener))


def check_certificate(options: ServeOptions) -> None:
    """Raise ConfigError where certificate and key cannot be read or do not belong together."""
    if options.certificate is None and options.key is None:
        return
    where = f"--certificate {options.certificate} --key {options.key}"
    if options.certificate is None:
        msg = f"{where}: a key is of a certificate; give both"
        raise ConfigError(msg)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            options.certificate, options.key
        )
    except (OSError, ssl.SSLError) as error:
        msg = f"{where}: {error}; give PEM files of one certificate and its key"
        raise ConfigError(msg) from error


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Yield a bound socket. Raises ConfigError where it cannot or must not be bound."""
    where = f"--host {options.host} --port {options.port}"
    try:
        family, *_, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if options.token is None and not ipaddress.ip_address(address[0]).is_loopback:
            msg = (
                f"{where}: whoever reaches this address could run programs here; give the clients' "
                "token as --token-file FILE or --token-env NAME, or serve 127.0.0.1 alone"
            )
            raise ConfigError(msg)
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        msg = f"{where}: {error.strerror or error}; choose another address or port"
        raise ConfigError(msg) from error
    with listener:
        yield listener


async def _serve(
    executor: Executor, tier: Tier, options: ServeOptions, listener: socket.socket
) -> None:
    desk = JobDesk(executor, tier, options.limits)
    gate = Gate(token=options.token)
    server = uvicorn.Server(server_config(build_app(desk, gate), options))
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.certificate is None else "https"
    options.on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        # Ends on SIGTERM or SIGINT, which uvicorn listens for, once what runs has ended or
        # drain_seconds are over.
        await server.serve(sockets=[listener])
    finally:
        await desk.close()
        await executor.close()


def server_config(app: FastAPI, options: ServeOptions) -> uvicorn.Config:
    """Return how ``app`` is served."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        # What a proxy says of its client changes nothing here.
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=options.drain_seconds,
        limit_concurrency=_connections(options.limits),
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )


def _connections(limits: DeskLimits) -> int:
    return 2 * (limits.num_slots + limits.max_queued) + _SPARE_CONNECTIONS


@contextlib.contextmanager
def _ends_quietly() -> Iterator[None]:
    """Let the signal that ended uvicorn end the process with status 0.

    uvicorn raises it once more after its shutdown, for the handlers that were there before.
    """

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """The shutdown that it asks for is done."""

    before = {number: signal.signal(number, ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"--token-file {file}: {error}"
        raise ConfigError(msg) from error


def _checked_token(where: str, token: str) -> str:
    if len(token) < _MIN_TOKEN_CHARACTERS or not is_api_key(token):
        msg = (
            f"{where}: a token has at least {_MIN_TOKEN_CHARACTERS} characters, all visible "
            "ASCII; make one with: openssl rand -hex 32"
        )
        raise ConfigError(msg)
    return token
