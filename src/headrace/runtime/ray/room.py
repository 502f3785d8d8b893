"""Room for the generators of a run on the machines of a cluster, taken before anything starts.

Owns: a run that asks for more than there is is refused with what it asked for and what there is;
what a run was given stays its own until it ends, so that two runs cannot each hold half of what
both need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.errors import ClusterError
from headrace.runtime.ray.cluster import Cluster, shown_nodes

ROOM_SECONDS = 60.0
"""For other runs to make room, where the cluster as a whole has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run's generators ask for."""

    num_generators: int
    num_cpus: float
    """Of each."""
    num_gpus: float
    """Of each."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one asks for, in Ray's words."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in wanted.items() if amount}

    def __str__(self) -> str:
        each = f"{self.num_cpus:g} CPUs"
        if self.num_gpus:
            each += f" and {self.num_gpus:g} GPUs"
        return f"{self.num_generators} generators of {each} each"


class Room:
    """What was taken: a place for each generator that a run begins with."""

    def __init__(self, demand: Demand, group: PlacementGroup) -> None:
        self.demand = demand
        self._group = group
        self._free = list(range(demand.num_generators))

    def take(self) -> int | None:
        """Take a place for a generator; None where all are taken, and it goes wherever it fits."""
        return self._free.pop(0) if self._free else None

    def give_back(self, place: int | None) -> None:
        """Leave ``place`` to another generator."""
        if place is not None:
            self._free.append(place)

    def options(self, place: int | None) -> dict[str, Any]:
        """Return how Ray is told of ``place``."""
        strategy: PlacementGroupSchedulingStrategy | str = "SPREAD"
        if place is not None:
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=place
            )
        return {
            "num_cpus": self.demand.num_cpus,
            "num_gpus": self.demand.num_gpus,
            "scheduling_strategy": strategy,
        }


def check_fits(cluster: Cluster, demand: Demand) -> None:
    """Raise ClusterError where the cluster could not hold ``demand`` even if it were idle."""
    room = sum(_fitting(node.num_cpus, node.num_gpus, demand) for node in cluster.nodes)
    if room < demand.num_generators:
        msg = (
            f"placement.num_generators: {demand} are wanted, and the cluster has room for "
            f"{room} of them ({shown_nodes(cluster.nodes)}); ask for fewer or smaller ones, or "
            "add machines"
        )
        raise ClusterError(msg)


def _fitting(num_cpus: float, num_gpus: float, demand: Demand) -> int:
    shares = [
        has // wants
        for has, wants in ((num_cpus, demand.num_cpus), (num_gpus, demand.num_gpus))
        if wants
    ]
    return int(min(shares, default=demand.num_generators))


@contextmanager
def reserved(
    cluster: Cluster, demand: Demand, timeout_seconds: float = ROOM_SECONDS
) -> Iterator[Room]:
    """Take room for ``demand``, on as many machines as there are, for the block.

    Raises ClusterError where there is none within ``timeout_seconds``.
    """
    check_fits(cluster, demand)
    group = placement_group([demand.bundle] * demand.num_generators, strategy="SPREAD")
    try:
        if not group.wait(timeout_seconds):
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            msg = (
                f"{demand} are wanted, and others did not make room for them within "
                f"{timeout_seconds:g} s: {free.get('CPU', 0.0):g} CPUs and "
                f"{free.get('GPU', 0.0):g} GPUs of the cluster are free; wait for the other runs, "
                "or ask for less"
            )
            raise ClusterError(msg)
        yield Room(demand, group)
    finally:
        with contextlib.suppress(RayError):
            remove_placement_group(group)
