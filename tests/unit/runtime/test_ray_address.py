"""Addresses of clusters: what is none, and what answers there and is no cluster."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.errors import ClusterError
from headrace.runtime.ray.address import Address, find_address, probe

SETTINGS_FRAME = bytes(3) + b"\x04" + bytes(5)


@contextmanager
def listening(answer: bytes | None) -> Iterator[Address]:
    """Accept one connection and answer it; None answers nothing for as long as the test takes."""
    over = threading.Event()

    def serve() -> None:
        line, _ = listener.accept()
        with line:
            line.recv(1024)
            if answer is None:
                over.wait()
            else:
                line.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield Address(host="127.0.0.1", port=listener.getsockname()[1])
        over.set()
        thread.join()


def test_a_host_and_a_port_are_an_address() -> None:
    assert find_address("10.0.0.7:6379") == Address(host="10.0.0.7", port=6379)
    assert find_address("[fd00::7]:6379") == Address(host="fd00::7", port=6379)


@pytest.mark.parametrize("text", ["", "host", "host:", ":6379", "host:ray", "host:0", "h:65536",
                                  "ray://host:10001"])  # fmt: skip
def test_what_is_no_address_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ClusterError, match="must be HOST:PORT") as refused:
        find_address(text)
    assert repr(text) in str(refused.value)


def test_auto_is_what_the_environment_names_or_else_for_ray_to_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert find_address("auto") == Address(host="10.0.0.7", port=6379)
    monkeypatch.delenv("RAY_ADDRESS")
    assert find_address("auto") is None


def test_what_speaks_http_2_may_be_a_cluster() -> None:
    with listening(SETTINGS_FRAME) as address:
        probe(address)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\x00"])
def test_what_answers_in_another_way_is_refused(answer: bytes) -> None:
    with (
        listening(answer) as address,
        pytest.raises(ClusterError, match="not the head of a Ray cluster"),
    ):
        probe(address)


def test_an_address_where_nobody_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ClusterError, match=r"no Ray cluster answers there .*refused"):
        probe(Address(host="127.0.0.1", port=port))


def test_an_address_that_takes_a_connection_and_says_nothing_is_refused_at_the_deadline() -> None:
    begun = time.monotonic()
    with listening(None) as address, pytest.raises(ClusterError, match=r"within 0\.1 s"):
        probe(address, timeout_seconds=0.1)
    assert time.monotonic() - begun < 60  # it ends at all
