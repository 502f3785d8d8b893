"""The Ray that a run is part of: started for the run alone, or a cluster that was there before.

Owns: a Ray of the run's own opens ports on 127.0.0.1 only, ends with the run, and leaves nothing on
the disk; a cluster is left as it was found. Every wait for Ray has a deadline.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError

from headrace.errors import ClusterError
from headrace.runtime.ray.address import find_address, probe
from headrace.runtime.ray.calls import one_line
from headrace.runtime.ray.reaper import reaped

_OWN_PARENT = Path("/tmp")  # noqa: S108 - a socket's name has 107 characters, and Ray needs 60
_OWN_PREFIX = "headrace-ray-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the cluster."""

    node_id: str
    host: str
    num_cpus: float
    """What Ray may give away, in all."""
    num_gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that were there at one moment, and which of them this one is."""

    address: str
    nodes: tuple[Node, ...]
    own_node_id: str

    @property
    def own_node(self) -> Node:
        """Where this process runs."""
        return next(node for node in self.nodes if node.node_id == self.own_node_id)


@contextmanager
def connected(address: str | None, *, store_bytes: int) -> Iterator[Cluster]:
    """Join the cluster at ``address``, or start a Ray of one's own with None, for the block.

    ``store_bytes``: memory of the object store of a Ray of one's own. Raises ClusterError.
    """
    with _own_ray(store_bytes) if address is None else _joined(address):
        yield current_cluster()


@contextmanager
def _joined(address: str) -> Iterator[None]:
    found = find_address(address)
    if found is not None:
        probe(found)
    shown = "auto" if found is None else str(found)
    try:
        ray.init(address=shown, logging_level=logging.ERROR, log_to_driver=False)
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        msg = f"--address {shown}: the cluster does not take this run: {one_line(error)}"
        raise ClusterError(msg) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_ray(store_bytes: int) -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix=_OWN_PREFIX, dir=_OWN_PARENT))
    with reaped(folder):
        try:
            ray.init(
                address="local",
                num_cpus=os.cpu_count() or 1,
                object_store_memory=store_bytes,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=str(folder),
            )
        except (RayError, RuntimeError, ValueError, OSError) as error:
            msg = f"--runtime ray: Ray could not be started here: {one_line(error)}"
            raise ClusterError(msg) from error
        try:
            yield
        finally:
            ray.shutdown()


def current_cluster() -> Cluster:
    """Return the machines that are there now."""
    context = ray.get_runtime_context()
    found = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [_node(one) for one in found if one["Alive"]]
    return Cluster(
        address=context.gcs_address,
        nodes=tuple(sorted(nodes, key=lambda node: (node.host, node.node_id))),
        own_node_id=context.get_node_id(),
    )


def own_address() -> str:
    """Return this machine's address, as Ray knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _node(found: dict[str, object]) -> Node:
    resources = found["Resources"]
    assert isinstance(resources, dict)
    return Node(
        node_id=str(found["NodeID"]),
        host=str(found["NodeManagerHostname"]),
        num_cpus=float(resources.get("CPU", 0.0)),
        num_gpus=float(resources.get("GPU", 0.0)),
    )


def shown_nodes(nodes: Sequence[Node]) -> str:
    """Return what each machine has, for a message."""
    return ", ".join(
        f"{node.host}: {node.num_cpus:g} CPUs, {node.num_gpus:g} GPUs" for node in nodes
    )
