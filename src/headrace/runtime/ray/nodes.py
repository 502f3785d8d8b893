"""Whether every machine of a cluster is there, and runs the same program as this one.

Records cross between machines as pickles, and a generator of another version would sample by other
rules; so what differs is refused, with both versions, before anything is placed.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import headrace
from headrace.errors import ClusterError
from headrace.runtime.ray.cluster import Cluster, Node, current_cluster, shown_nodes

ANSWER_SECONDS = 120.0
"""For a machine to start a process that says its versions; a cold disk imports slowly."""

JOIN_SECONDS = 300.0
"""For all machines that a run waits for to join the cluster."""
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What must be the same everywhere."""

    headrace: str
    """Its number, and a digest of its source, since a number outlives many changes."""
    python: str
    ray: str


@functools.cache
def own_versions() -> Versions:
    """Return those of this process."""
    root = Path(headrace.__file__).parent
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return Versions(
        headrace=f"{headrace.__version__} (source {digest.hexdigest()})",
        python=platform.python_version(),
        ray=ray.__version__,
    )


def wait_for_nodes(num_nodes: int, timeout_seconds: float = JOIN_SECONDS) -> Cluster:
    """Return the cluster once it has so many machines. Raises ClusterError at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while len((cluster := current_cluster()).nodes) < num_nodes:
        if time.monotonic() > deadline:
            msg = (
                f"--nodes {num_nodes}: the cluster at {cluster.address} has "
                f"{len(cluster.nodes)} within {timeout_seconds:g} s "
                f"({shown_nodes(cluster.nodes)}); see why the others did not join, or ask for "
                "fewer"
            )
            raise ClusterError(msg)
        time.sleep(_POLL_SECONDS)
    return cluster


def check_versions(cluster: Cluster, timeout_seconds: float = ANSWER_SECONDS) -> None:
    """Ask every machine for its versions; raises ClusterError that names what differs."""
    asked = {
        node: _ask_versions.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        ).remote()
        for node in cluster.nodes
    }
    done, _ = ray.wait(
        list(asked.values()), num_returns=len(asked), timeout=timeout_seconds, fetch_local=False
    )
    problems = [
        problem
        for node, answer in asked.items()
        for problem in _problems(node, answer if answer in done else None, timeout_seconds)
    ]
    if problems:
        raise ClusterError("; ".join(problems))


@ray.remote(num_cpus=0, max_retries=0)
def _ask_versions() -> Versions:
    return own_versions()


def _problems(
    node: Node, answer: ray.ObjectRef[Versions] | None, timeout_seconds: float
) -> list[str]:
    if answer is None:
        return [f"node {node.host} did not say its versions within {timeout_seconds:g} s"]
    try:
        found = ray.get(answer, timeout=timeout_seconds)
    except (RayError, GetTimeoutError) as error:
        last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
        return [f"node {node.host} cannot run headrace: {last}; install it there as it is here"]
    return [
        f"node {node.host} has {name} {value}, and this one {mine}; install the same on both"
        for name, value in asdict(found).items()
        if value != (mine := getattr(own_versions(), name))
    ]
