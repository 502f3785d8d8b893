"""Room for what a run has on the machines of a cluster, taken before anything starts.

Owns: a run that asks for more than there is is refused with what it asked for and what there is;
what a run was given stays its own until it ends. Of two runs that each hold half of what both need,
neither waits for ever: who does not have everything at the deadline gives all of it back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.errors import ClusterError
from headrace.runtime.ray.cluster import Cluster, shown_nodes

ROOM_SECONDS = 60.0
"""For other runs to make room, where the cluster as a whole has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks for several times."""

    what: str
    """"generators", say, and the setting that asks for them."""
    setting: str
    count: int
    num_cpus: float
    """Of each."""
    num_gpus: float
    """Of each."""
    strategy: str = "SPREAD"
    """How Ray divides them: over as many machines as there are, or PACK, as few as will do."""

    @property
    def bundle(self) -> dict[str, float]:
        """What one asks for, in Ray's words."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in wanted.items() if amount}

    def __str__(self) -> str:
        each = f"{self.num_cpus:g} CPUs"
        if self.num_gpus:
            each += f" and {self.num_gpus:g} GPUs"
        return f"{self.count} {self.what} of {each} each"


class Room:
    """What was taken: a place for each of those that a run begins with."""

    def __init__(self, demand: Demand, group: PlacementGroup) -> None:
        self.demand = demand
        self._group = group
        self._free = list(range(demand.count))

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The machines of the places, in their order."""
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return tuple(found[place] for place in range(self.demand.count))

    def take(self) -> int | None:
        """Take a place; None where all are taken, and who asks goes wherever there is room."""
        return self._free.pop(0) if self._free else None

    def give_back(self, place: int | None) -> None:
        """Leave ``place`` to another one."""
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


def check_fits(cluster: Cluster, demands: Sequence[Demand]) -> None:
    """Raise ClusterError where the cluster could not hold ``demands`` even if it were idle.

    Each in turn takes what the ones before it leave.
    """
    left = [(node.num_cpus, node.num_gpus) for node in cluster.nodes]
    for demand in demands:
        missing = demand.count
        for i, (cpus, gpus) in enumerate(left):
            taken = min(missing, _fitting(cpus, gpus, demand))
            left[i] = (cpus - taken * demand.num_cpus, gpus - taken * demand.num_gpus)
            missing -= taken
        if missing:
            others = " and ".join(str(other) for other in demands if other is not demand)
            msg = (
                f"{demand.setting}: {demand} are wanted, and the cluster has room for "
                f"{demand.count - missing} of them{f' beside {others}' if others else ''} "
                f"({shown_nodes(cluster.nodes)}); ask for fewer or smaller ones, or add machines"
            )
            raise ClusterError(msg)


def _fitting(num_cpus: float, num_gpus: float, demand: Demand) -> int:
    shares = [
        has // wants
        for has, wants in ((num_cpus, demand.num_cpus), (num_gpus, demand.num_gpus))
        if wants
    ]
    return int(min(shares, default=demand.count))


@contextmanager
def reserved(
    cluster: Cluster, demands: Sequence[Demand], timeout_seconds: float = ROOM_SECONDS
) -> Iterator[tuple[Room, ...]]:
    """Take room for each of ``demands`` for the block.

    Raises ClusterError where there is none for one of them within ``timeout_seconds``.
    """
    check_fits(cluster, demands)
    deadline = time.monotonic() + timeout_seconds
    groups = [
        placement_group([demand.bundle] * demand.count, strategy=demand.strategy)
        for demand in demands
    ]
    try:
        for demand, group in zip(demands, groups, strict=True):
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise ClusterError(_not_given(demand, timeout_seconds))
        yield tuple(Room(demand, group) for demand, group in zip(demands, groups, strict=True))
    finally:
        for group in groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def _not_given(demand: Demand, timeout_seconds: float) -> str:
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    return (
        f"{demand} are wanted, and others did not make room for them within "
        f"{timeout_seconds:g} s: {free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs "
        "of the cluster are free; wait for the other runs, or ask for less"
    )
