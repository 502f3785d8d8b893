"""Where generators, verifiers and ranks are on a cluster: everywhere but in this process.

Controller and buffer stay in the process that joined the cluster, and a learner that has no
processes of its own with them. A Ray of the run's own is this machine, so there the ranks are the
process's children, as they are without Ray, and share its memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.compute import ComputeThread
from headrace.config import RunConfig
from headrace.errors import ConfigError
from headrace.learners.parallel.hosts import RankHosts
from headrace.roles import Verifier
from headrace.runtime.cores import learner_threads, threads_of_each
from headrace.runtime.devices import engine_device, resolve_device
from headrace.runtime.generators import RunGenerator, build_generator, build_pool
from headrace.runtime.places import Places, local_hosts, window_of
from headrace.runtime.preflight import PreparedModel, PreparedRun
from headrace.runtime.ray.cluster import Cluster, connected
from headrace.runtime.ray.member import ActorLauncher, ActorSpec
from headrace.runtime.ray.nodes import check_versions, wait_for_nodes
from headrace.runtime.ray.object_store import ObjectStoreCarrier, ObjectStoreFetcher
from headrace.runtime.ray.rank_hosts import RayHosts
from headrace.runtime.ray.reach import check_reach
from headrace.runtime.ray.room import Demand, Room, reserved
from headrace.runtime.ray.verifiers import ClusterVerifier
from headrace.waves import PausableGenerator
from headrace.weight_sync import WeightChannel
from headrace.weight_sync.chained import ChainedReader, ChainedStore
from headrace.weight_sync.store import WholeReader, WholeStore

GENERATORS, RANKS = "generators", "ranks"
_LEAST_STORE = 256 * 2**20
"""Bytes, for rollouts on their way."""
_KEPT_VERSIONS = 4
"""Published versions that a store may hold at once: two that can be opened, one that is put, one
that a reader still has."""


@contextmanager
def placed(
    prepared: PreparedRun, directory: Path, address: str | None, num_nodes: int | None
) -> Iterator[Places]:
    """Yield the places; see `begin.places_on_ray`."""
    config = prepared.config
    _require_far_weights(config)
    store_bytes = _LEAST_STORE + _KEPT_VERSIONS * _weight_bytes(prepared.model)
    with connected(address, store_bytes=store_bytes) as joined:
        cluster = joined if num_nodes is None else wait_for_nodes(num_nodes)
        check_versions(cluster)
        demands = _demands(config, cluster, ranks_are_here=address is None)
        with reserved(cluster, list(demands.values())) as rooms:
            of = dict(zip(demands, rooms, strict=True))
            if RANKS in of:
                check_reach(of[RANKS].node_ids, directory.absolute(), prepared.model.directory)
            yield RayPlaces(cluster, generators=of.get(GENERATORS), ranks=of.get(RANKS))


def _require_far_weights(config: RunConfig) -> None:
    """Refuse another way for weights than Ray's own, which reaches every machine."""
    transport = config.weight_sync.transport
    if config.placement.is_disaggregated and transport != "auto":
        msg = (
            f'weight_sync.transport = "{transport}" with --runtime ray: generators may be on any '
            'machine, and weights reach them through Ray\'s object store; use "auto"'
        )
        raise ConfigError(msg)


def _weight_bytes(model: PreparedModel) -> int:
    """Return the bytes of the checkpoint's files, which published weights are about as large as."""
    return sum(path.stat().st_size for path in model.directory.glob("*.safetensors"))


def _demands(config: RunConfig, cluster: Cluster, *, ranks_are_here: bool) -> dict[str, Demand]:
    """Return what is asked of Ray, the ranks first, which are not to be torn apart by the rest."""
    found = {}
    if config.learner.parallel.has_processes and not ranks_are_here:
        found[RANKS] = _rank_demand(config, cluster)
    if config.placement.is_disaggregated:
        found[GENERATORS] = _generator_demand(config, cluster)
    return found


def _rank_demand(config: RunConfig, cluster: Cluster) -> Demand:
    """Return what ranks ask for, on as few machines as will do: they exchange every gradient.

    Of cores each has its part of the learner's, as on one machine that has its share of the ranks.
    """
    count = config.learner.parallel.num_ranks
    share = math.ceil(count / len(cluster.nodes))
    num_threads = learner_threads(config, config.num_threads or os.cpu_count() or 1)
    return Demand(
        what="ranks of the learner",
        setting="learner.parallel",
        count=count,
        num_cpus=max(1, num_threads // share),
        num_gpus=1 if resolve_device(config.device).type == "cuda" else 0,
        strategy="PACK",
    )


def _generator_demand(config: RunConfig, cluster: Cluster) -> Demand:
    """Return what generators ask for: a core for each thread, and a device where they use one."""
    placement = config.placement
    share = math.ceil(placement.num_generators / len(cluster.nodes))
    # Threads that the recipe leaves open are those of a machine that has its share of generators.
    on_one = placement.model_copy(update={"num_generators": share})
    num_threads = config.num_threads or os.cpu_count() or 1
    return Demand(
        what="generators",
        setting="placement.num_generators",
        count=placement.num_generators,
        num_cpus=threads_of_each(config.model_copy(update={"placement": on_one}), num_threads),
        num_gpus=1 if engine_device(config).type == "cuda" else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The two ends of Ray's object store."""

    carrier: ObjectStoreCarrier
    fetcher: ObjectStoreFetcher


class RayPlaces:
    """See `Places`."""

    def __init__(self, cluster: Cluster, *, generators: Room | None, ranks: Room | None) -> None:
        """Rooms: of generators in actors, or None for the one in this process; and of ranks.

        With None these are on this machine, if the learner has any.
        """
        self._cluster, self._room, self._ranks = cluster, generators, ranks
        self._ends: _Ends | None = None

    def channel(self, config: RunConfig, compute: ComputeThread) -> WeightChannel | None:
        """See `Places`."""
        if self._room is None:
            return None
        carrier = ObjectStoreCarrier()
        fetcher = ObjectStoreFetcher(deadline_seconds=config.weight_sync.deadline_seconds)
        self._ends = _Ends(carrier=carrier, fetcher=fetcher)
        delta = config.weight_sync.delta
        if delta is not None:
            return WeightChannel(
                store=ChainedStore(carrier, whole_every=delta.whole_every, compute=compute),
                reader=ChainedReader(fetcher),
            )
        return WeightChannel(store=WholeStore(carrier, compute), reader=WholeReader(fetcher))

    def generator(
        self,
        config: RunConfig,
        model: PreparedModel,
        compute: ComputeThread,
        channel: WeightChannel | None,
    ) -> PausableGenerator:
        """See `Places`."""
        if channel is None:
            return build_generator(config, model, compute)
        assert self._room is not None
        assert self._ends is not None, "the channel is built first"
        spec = RunGenerator(
            config=config,
            model_directory=model.directory,
            num_threads=int(self._room.demand.num_cpus),
            reader=channel.reader,
        )
        launch = ActorLauncher(
            ActorSpec(generator=spec, fetcher=self._ends.fetcher),
            self._room,
            self._ends.carrier,
            deadline_seconds=config.placement.start_deadline_seconds,
        )
        return build_pool(config, launch, channel)

    def verifier(self, config: RunConfig) -> Verifier:
        """See `Places`."""
        return ClusterVerifier(config.verifier, self._cluster, window=window_of(config))

    def rank_hosts(self, config: RunConfig, compute: ComputeThread) -> RankHosts:
        """See `Places`."""
        if self._ranks is None:
            return local_hosts(config, compute)
        return RayHosts(
            self._ranks,
            silence_seconds=config.placement.hang_seconds,
            deadline_seconds=config.placement.start_deadline_seconds,
        )
