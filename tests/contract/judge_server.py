"""A judge's endpoint that says what a test tells it to: right, late, broken or hostile.

A real server on a real socket. Nothing here imports headrace.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Said:
    """One reply."""

    content: str | None = None
    """What the model writes."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent instead of a reply of the interface."""
    seconds: float = 0.0
    """Before it is sent."""
    breaks_off: bool = False
    """Announces more than it sends, and closes."""

    @property
    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        message = {"role": "assistant", "content": self.content}
        return json.dumps({"choices": [{"index": 0, "message": message}]}).encode()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    at: float

    @property
    def system(self) -> str:
        return str(self.body["messages"][0]["content"])

    @property
    def user(self) -> str:
        return str(self.body["messages"][1]["content"])


Script = Callable[[Asked, int], Said]
"""Request and its number, from 0 -> reply."""


def graded(points: object, reason: str = "because") -> Said:
    return Said(content=json.dumps({"reason": reason, "points": points}))


class _Quiet(ThreadingHTTPServer):
    """Says nothing of clients that leave: tests have them do so."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in the base
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class JudgeServer:
    """Answers by its script and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: Script = lambda _asked, _number: graded(1)
        self.asked: list[Asked] = []
        self.models = Said(raw=b'{"data": [{"id": "m"}]}')
        """The list of models."""
        self.keys: list[str | None] = []
        """With which that was asked for."""
        self.open = self.most_open = 0
        self.num_broken_off = 0
        """Requests whose client left before the reply."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._was_asked = threading.Event()
        self._server = _Quiet(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def says(self, *replies: Said) -> None:
        """Answer with ``replies`` in order, and with the last one from then on."""
        self.script = lambda _asked, number: replies[min(number, len(replies) - 1)]

    def wait_for_a_question(self) -> None:
        assert self._was_asked.wait(120)

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _handler(self) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - a class in a function
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                asked = Asked(
                    path=self.path,
                    headers=dict(self.headers.items()),
                    body=json.loads(self.rfile.read(length)),
                    at=time.monotonic(),
                )
                with judge._counted(asked) as number:
                    self._say(judge.script(asked, number))

            def do_GET(self) -> None:
                judge.keys.append(self.headers["Authorization"])
                self._say(judge.models)

            def _say(self, said: Said) -> None:
                if not self._wait(said.seconds):
                    self.close_connection = True
                    return
                body = said.body
                self.send_response(said.status)
                for name, value in said.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) + 100 * said.breaks_off))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)
                self.close_connection = said.breaks_off

            def _wait(self, seconds: float) -> bool:
                """Wait as told; false once the client has left or the test is over."""
                until = time.monotonic() + seconds
                while time.monotonic() < until and not judge._ended.wait(0.01):
                    if self._has_left():
                        judge.num_broken_off += 1
                        return False
                return True

            def _has_left(self) -> bool:
                try:
                    return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
                except BlockingIOError:
                    return False
                except OSError:
                    return True

            def log_message(self, *_: object) -> None:
                """Say nothing on standard error."""

        return Handler

    @contextlib.contextmanager
    def _counted(self, asked: Asked) -> Iterator[int]:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self._was_asked.set()
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        try:
            yield number
        finally:
            with self._lock:
                self.open -= 1
