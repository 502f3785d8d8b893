"""Programs that tests run in a process of their own, which joins a cluster: Ray is one per process.

``python on_cluster.py ADDRESS NAME ARGUMENTS...`` prints one JSON value.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ray
import torch

from headrace.config import FunctionConfig, VerifierConfig
from headrace.errors import WeightSyncError
from headrace.runtime.ray.cluster import current_cluster
from headrace.runtime.ray.member import GeneratorActor
from headrace.runtime.ray.object_store import ObjectStoreCarrier, ObjectStoreFetcher
from headrace.runtime.ray.verifiers import ClusterVerifier
from headrace.types import Prompt, Rollout, RolloutGroup, SamplingParams, WeightUpdate
from headrace.weight_sync.chained import ChainedReader, ChainedStore
from headrace.weight_sync.store import WholeReader, WholeStore


def group(number: int) -> RolloutGroup:
    rollout = Rollout(
        rollout_index=0,
        completion_ids=(),
        loss_mask=(),
        generator_logprobs=(),
        version_spans=(),
        finish_reason="stop",
        text=str(number),
    )
    prompt = Prompt(prompt_id=str(number), source="test", text="?", token_ids=(1,))
    return RolloutGroup(
        group_id=str(number), prompt=prompt, rollouts=(rollout,), sampling=SamplingParams()
    )


def verifier(reward: str) -> ClusterVerifier:
    component = FunctionConfig(kind="function", path=reward, num_processes=4, weight=1.0)
    return ClusterVerifier(
        VerifierConfig(components={"it": component}), current_cluster(), window=8
    )


async def one_of_two_verifiers_is_killed(reward: str, touched: str) -> Any:  # noqa: ANN401 - JSON
    """Kill one of the two actors while each scores groups; return the rewards."""
    scoring = verifier(reward)
    try:
        pids = [await place.actor.__ray_call__.remote(_pid) for place in scoring._places]
        tasks = [asyncio.create_task(scoring.score(group(number))) for number in range(4)]
        await asyncio.to_thread(wait_for_files, Path(touched), len(tasks))
        os.kill(pids[0], signal.SIGKILL)
        verdicts = [await task for task in tasks]
        moved = scoring.metrics()["verifier/cluster/num_moved_groups"]
    finally:
        await scoring.close()
    return {"rewards": [verdict[0].reward for verdict in verdicts], "moved": moved}


def wait_for_files(folder: Path, count: int) -> None:
    while len(list(folder.iterdir())) < count:
        time.sleep(0.05)


def _pid(_: object) -> int:
    return os.getpid()


async def weights_come_back_as_they_were() -> Any:  # noqa: ANN401 - JSON
    """Publish twice through the store, read both, and then one that was given up."""
    carrier, fetcher = ObjectStoreCarrier(), ObjectStoreFetcher(deadline_seconds=30)
    store, reader = WholeStore(carrier), WholeReader(fetcher)
    found: list[object] = []
    for version in (1, 2):
        tensors = {
            "a": torch.full((3, 5), -0.0 + version, dtype=torch.bfloat16),
            "b": torch.tensor([float("nan"), float(version)]),
        }
        update = WeightUpdate(policy_version=version, tensors=tensors, checksum=7)
        notice = await store.write(update)
        fetcher.learn(carrier.refs(notice))
        with reader.open(notice) as read:
            same = all(
                torch.equal(read.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
                for name, tensor in tensors.items()
            )
            found.append([read.policy_version, read.checksum, same])
    store.release(3)
    fetcher.learn(carrier.refs(notice))
    try:
        with reader.open(notice):
            pass
    except WeightSyncError as error:
        found.append(str(error))
    return found


async def changes_come_back_as_they_were() -> Any:  # noqa: ANN401 - JSON
    """Publish four versions as changes; return how many parts each had, and whether it was right.

    One reader follows; another one begins with each.
    """
    carrier, fetcher = ObjectStoreCarrier(), ObjectStoreFetcher(deadline_seconds=30)
    store, reader = ChainedStore(carrier, whole_every=3), ChainedReader(fetcher)
    tensor = torch.zeros(64, 8, dtype=torch.bfloat16)
    found: list[list[object]] = []
    for version in range(1, 5):
        tensor = tensor.clone()
        tensor[version, 0] = -0.0 if version == 2 else float("nan")
        update = WeightUpdate(policy_version=version, tensors={"a": tensor}, checksum=version)
        notice = await store.write(update)
        for each in (reader, ChainedReader(fetcher)):
            fetcher.learn(carrier.refs(notice))
            with each.open(notice) as read:
                same = torch.equal(read.tensors["a"].view(torch.uint8), tensor.view(torch.uint8))
            found.append([len(notice.parts), same])
    return found


async def calls_that_come_in_another_order_begin_in_theirs() -> Any:  # noqa: ANN401 - JSON
    """Ask an actor's own class for a later question before an earlier one."""
    begun: list[str] = []

    class Host:
        async def answer(self, question: str) -> None:
            begun.append(question)

    actor = GeneratorActor.__ray_metadata__.modified_class()
    actor._host = Host()
    later = asyncio.create_task(actor.answer(1, "later", (), {}))
    await asyncio.sleep(0.05)
    await actor.answer(0, "earlier", (), {})
    await later
    return begun


def main() -> None:
    """Join, run one program, and print what it returns."""
    address, name, *arguments = sys.argv[1:]
    program: Callable[..., Awaitable[Any]] = globals()[name]
    ray.init(address=address, logging_level="error", log_to_driver=False)
    print(json.dumps(asyncio.run(program(*arguments))))  # noqa: T201 - for the test
    ray.shutdown()


if __name__ == "__main__":
    main()
