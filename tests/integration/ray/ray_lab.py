"""Ray clusters of one machine, for tests: real ones, on 127.0.0.1 alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

PROCESSES = ("raylet", "gcs_server", "ray::")
"""How those of Ray are named."""


@contextmanager
def cluster(*pythonpaths: Path | None, num_cpus: int = 1) -> Iterator[str]:
    """Start a cluster with a node for each of ``pythonpaths``; yield its address.

    A node imports headrace from its path, or with None from where the test does. Another process
    has it, since Ray is for one cluster in each.
    """
    paths = (str(path or "") for path in pythonpaths)
    command = [sys.executable, __file__, str(num_cpus), *paths]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(60)


def refused_on(address: str, call: str) -> str:
    """Return what a ClusterError says that ``call`` raises in a process that joined a cluster."""
    program = f"""
from headrace.runtime.ray.environment import prepare
prepare(is_own=False)
from headrace.errors import ClusterError
from headrace.runtime.ray import cluster, nodes, room
with cluster.connected({address!r}, store_bytes=0) as joined:
    try:
        {call}
    except ClusterError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.strip()


def ray_processes_below(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            words = [process.name(), *process.cmdline()]
        except psutil.NoSuchProcess:
            continue
        if any(name in word for name in PROCESSES for word in words):
            found.append(process)
    return found


def main() -> None:
    """Hold a cluster until the standard input is closed."""
    from headrace.runtime.ray.environment import prepare  # noqa: PLC0415 - before ray

    prepare(is_own=True)
    # Who joins a cluster has no token of it.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - reads what was prepared

    num_cpus, *paths = sys.argv[1:]
    held = Cluster()
    with tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True) as folder:
        for path in paths:
            held.add_node(
                num_cpus=int(num_cpus),
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                env_vars={"PYTHONPATH": path} if path else None,
                temp_dir=folder,
            )
        sys.stdout.write(f"{held.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
        held.shutdown()


if __name__ == "__main__":
    main()
