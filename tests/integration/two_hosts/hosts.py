"""Two hosts on one machine: network namespaces with a line between them and no other."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.231.57"
"""Of these hosts alone: nothing outside the namespaces has a route to it."""
LINE = "eth0"


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], **options: object
    ) -> subprocess.Popen[str]:
        """Start a process on this host."""
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            ["ip", "netns", "exec", self.name, *command],  # noqa: S607 - wherever it is installed
            env=os.environ | environment,
            text=True,
            **options,
        )

    def cut_off(self) -> None:
        """Take its line down, as a switch that fails does."""
        ip("-n", self.name, "link", "set", LINE, "down")

    def join(self) -> None:
        """Bring it up again."""
        ip("-n", self.name, "link", "set", LINE, "up")
        self.route()

    def route(self) -> None:
        """Send everything over the line: Ray asks the routes which address is its own."""
        ip("-n", self.name, "route", "replace", "default", "dev", LINE)

    def pids(self) -> list[int]:
        """Return the processes on it."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]


def ip(*words: str) -> str:
    """Call iproute2; raises CalledProcessError."""
    done = subprocess.run(["ip", *words], check=True, capture_output=True, text=True)  # noqa: S607
    return done.stdout


def why_not() -> str | None:
    """Return why this machine cannot have hosts, or None."""
    try:
        ip("netns", "add", "hrprobe")
        ip("netns", "del", "hrprobe")
    except FileNotFoundError:
        return "iproute2 is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused: {error.stderr.strip()}"
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts; what runs on them, and they themselves, are gone behind the block."""
    first, second = (Host(f"hr{os.getpid()}-{n}", f"{NETWORK}.{n}") for n in (1, 2))
    try:
        for host in (first, second):
            ip("netns", "add", host.name)
        ip(
            *("link", "add", LINE, "netns", first.name),
            *("type", "veth", "peer", "name", LINE, "netns", second.name),
        )
        for host in (first, second):
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", LINE)
            ip("-n", host.name, "link", "set", LINE, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            host.route()
        yield first, second
    finally:
        for host in (first, second):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in host.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                ip("netns", "del", host.name)
