"""The part of `bench async` about weights: what a publication costs, and what it saves.

SmolLM2-135M, its masters in fp32 in this process and a torch generator in bf16 in another one, a
pool of one as `[placement]` makes it.

``weight_sync_vs_memcpy``: a whole publication, from the masters until the idle generator samples
from it, through shared memory, over a memcpy of the weights in bf16 with as many cores; the fastest
of several of each. ``generator_stall_ms``: the longest time without a decode step at publications
beside which rollouts go on, weights being staged; each time on as many cores as both processes
share. ``delta_bytes_share``: bytes of the changes of one AdamW step at learning rate 1e-6 over
those of all weights, the largest of several steps, each added up again and compared bit for bit;
gradients are of the loss on text.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.result import Figures, Peers, Progress, num_usable_cpus
from headrace.bench.timing import memcpy_seconds
from headrace.compute import ComputeThread
from headrace.config import WeightSyncConfig
from headrace.errors import RunError
from headrace.generators.pool import ChildLauncher, GeneratorPool, PoolSettings
from headrace.generators.pool.proxy import Hosted
from headrace.models.catalogue import resolve_model
from headrace.models.weights import copied_update, same_bits
from headrace.roles import WeightReader
from headrace.types import GenerationRequest, Prompt, SamplingParams, WeightUpdate
from headrace.weight_sync import StoredWeightSync, WeightChannel, build_weight_channel
from headrace.weight_sync.delta import apply, encode

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.models.decoder import Decoder

MODEL = "smollm2-135m"
NUM_PUBLICATIONS = 8
"""Of each kind; the first ones touch memory that later ones use again."""
NUM_ROLLOUTS = 16
NUM_TOKENS = 400
NUM_STEPS = 3
LEARNING_RATE = 1e-6
TEXT_TOKENS = 512
"""Tokens of a gradient."""
_START_SECONDS = 300.0
_STALL = "generator/weights/max_stall_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchGenerator:
    """What the generator's process builds."""

    model: Path
    num_threads: int
    staged: bool
    reader: WeightReader

    def build(self) -> Hosted:
        """See `GeneratorSpec`."""
        import torch

        from headrace.generators import TorchGenerator
        from headrace.models.decoder_config import DecoderConfig
        from headrace.models.hf_files import read_hf_config

        torch.set_num_threads(1)
        generator = TorchGenerator(
            DecoderConfig.from_hf(read_hf_config(self.model), origin=str(self.model)),
            decode=str,
            compute=ComputeThread("generator", self.num_threads),
            dtype=torch.bfloat16,
            on_update="keep",
            max_cache_bytes=1 << 30,
            staged_updates=self.staged,
        )
        return Hosted(generator=generator, weights=self.reader)


class _Publisher:
    """A learner's end: masters on a compute thread."""

    def __init__(self, decoder: Decoder, compute: ComputeThread, channel: WeightChannel) -> None:
        self._masters = {name: weight.detach() for name, weight in decoder.named_parameters()}
        self._compute, self._channel = compute, channel
        self._version = 0

    async def publish(self, pool: GeneratorPool) -> float:
        """Publish the next version; return the seconds until the generator samples from it."""
        self._version += 1
        began = time.perf_counter()
        sync = StoredWeightSync(self._export, self._channel.store, [pool])
        await (await sync.publish(self._version))
        return time.perf_counter() - began

    async def _export(self) -> WeightUpdate:
        return await asyncio.wrap_future(self._compute.submit(self._exported))

    def _exported(self) -> WeightUpdate:
        import torch

        assert self._channel.room is not None, "shared memory is a room"
        shapes = {name: tensor.shape for name, tensor in self._masters.items()}
        room = self._channel.room.take(shapes, torch.bfloat16)
        return copied_update(self._version, self._masters, room)


def measure(_peers: Peers, progress: Progress) -> Figures:
    """Return the three figures. Raises ModelError when the model was not fetched."""
    return asyncio.run(_publications(progress)) | _changes(progress)


async def _publications(progress: Progress) -> dict[str, float]:
    from headrace.models.checkpoint import load_decoder

    model, cores = resolve_model(MODEL), num_usable_cpus()
    decoder = load_decoder(model)
    compute = ComputeThread("learner", cores)
    try:
        memcpy = compute.submit(lambda: _memcpy_seconds(decoder)).result()
        progress(f"a memcpy of the weights in bf16: {1e3 * memcpy:.1f} ms")
        async with _pool(model, cores, staged=False) as (pool, channel):
            publisher = _Publisher(decoder, compute, channel)
            seconds = [await publisher.publish(pool) for _ in range(NUM_PUBLICATIONS)]
        progress(f"publications: {[round(1e3 * found) for found in seconds]} ms")
        async with _pool(model, cores, staged=True) as (pool, channel):
            stalls = await _stalls(pool, _Publisher(decoder, compute, channel))
        progress(f"stalls: {[round(1e3 * found, 1) for found in stalls]} ms")
    finally:
        compute.close()
    return {
        "weight_sync_vs_memcpy": min(seconds) / memcpy,
        "weight_sync_ms": 1e3 * min(seconds),
        "generator_stall_ms": 1e3 * max(stalls[2:]),
    }


def _memcpy_seconds(decoder: Decoder) -> float:
    return memcpy_seconds(list(_published(decoder).values()))


@asynccontextmanager
async def _pool(
    model: Path, num_threads: int, *, staged: bool
) -> AsyncIterator[tuple[GeneratorPool, WeightChannel]]:
    channel = build_weight_channel(WeightSyncConfig(), None)
    spec = BenchGenerator(
        model=model, num_threads=num_threads, staged=staged, reader=channel.reader
    )
    settings = PoolSettings(num_members=1, max_rollouts=NUM_ROLLOUTS, heartbeat_seconds=0.2)
    launch = ChildLauncher(spec, deadline_seconds=_START_SECONDS)
    pool = GeneratorPool(launch, settings, channel.store)
    try:
        yield pool, channel
    finally:
        await pool.close()
        channel.store.close()


async def _stalls(pool: GeneratorPool, publisher: _Publisher) -> list[float]:
    """Return the stall of each publication while rollouts go on."""
    await publisher.publish(pool)
    prompt = Prompt(prompt_id="p", source="bench", text="", token_ids=tuple(range(1, 65)))
    request = GenerationRequest(
        group_id="g",
        prompt=prompt,
        group_size=NUM_ROLLOUTS,
        sampling=SamplingParams(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS),
        seed=0,
    )
    sampling = asyncio.create_task(_sampled(pool, request))
    await asyncio.sleep(1.0)  # until tokens are sampled
    found: list[float] = []
    while len(found) < NUM_PUBLICATIONS:
        pool.metrics()
        await publisher.publish(pool)
        await asyncio.sleep(0.5)  # a step, and a beat that tells of it
        if sampling.done():
            msg = f"rollouts of {NUM_TOKENS} tokens ended before {NUM_PUBLICATIONS} publications"
            raise RunError(msg)
        found.append(pool.metrics().get(_STALL, 0.0))
    sampling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampling
    return found


async def _sampled(pool: GeneratorPool, request: GenerationRequest) -> None:
    async for _ in pool.generate([request]):
        pass


def _changes(progress: Progress) -> dict[str, float]:
    """Train a little, and encode what each step changed in bf16."""
    import torch

    from headrace.models.checkpoint import load_decoder

    decoder = load_decoder(resolve_model(MODEL))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    texts = _texts(decoder)
    before, shares, num_changed = _published(decoder), [], 0
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(_loss(decoder, texts[step % len(texts)]))
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        after = _published(decoder)
        changes = encode(before, after)
        num_changed = sum(int((before[name] != after[name]).sum()) for name in after)
        apply(changes, before)
        if not all(same_bits(before[name], after[name]) for name in after):
            msg = "the changes of a step do not add up to it"
            raise RunError(msg)
        shares.append(_bytes(changes.values()) / _bytes(after.values()))
        progress(f"step {step + 1}: {num_changed} numbers changed, {100 * shares[-1]:.2f} %")
    return {"delta_bytes_share": max(shares)}


def _published(decoder: Decoder) -> dict[str, Tensor]:
    return {name: weight.detach().bfloat16() for name, weight in decoder.named_parameters()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _texts(decoder: Decoder) -> list[Tensor]:
    """Return token ids of text that is at hand: docstrings."""
    import torch

    from headrace.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model(MODEL))
    sources = [asyncio, contextlib, torch.nn.Linear, torch.optim.AdamW]
    text = "\n".join(source.__doc__ or "" for source in sources) * 8
    ids = torch.tensor(tokenizer.encode(text))
    assert int(ids.max()) < decoder.config.vocab_size
    return list(torch.split(ids, TEXT_TOKENS))[:NUM_STEPS]


def _loss(decoder: Decoder, ids: Tensor) -> Tensor:
    import torch

    from headrace.models.attention import PackedCausal, positions_of

    attention = PackedCausal([len(ids)], decoder.config.windows)
    logits = decoder.logits(decoder(ids, positions_of([len(ids)]), attention))
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
