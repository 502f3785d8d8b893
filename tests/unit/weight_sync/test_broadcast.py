from __future__ import annotations

import asyncio
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broadcast_lab import BUCKET_BYTES, StoppingReader, dying_writer, made
from sync_lab import reader_process, update, weights
from torch import Tensor

from headrace.config import WeightSyncConfig
from headrace.errors import ConfigError, WeightSyncError
from headrace.models.weights import checksum, same_bits
from headrace.roles import WeightReader, WeightStore
from headrace.types import WeightNotice, WeightPart
from headrace.weight_sync import broadcast, build_weight_channel
from headrace.weight_sync.broadcast import BroadcastCarrier
from headrace.weight_sync.broadcast_group import Group
from headrace.weight_sync.broadcast_reader import MAX_ROUNDS, BroadcastReader
from headrace.weight_sync.store import RoomStore


@pytest.fixture
def store() -> Iterator[RoomStore]:
    store, _ = made()
    yield store
    store.close()


@pytest.fixture
def readers() -> Iterator[list[BroadcastReader]]:
    _, reader = made()
    copies = [pickle.loads(pickle.dumps(reader)) for _ in range(3)]  # noqa: S301
    yield copies
    for copy in copies:
        copy.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def write(store: WeightStore, version: int) -> WeightNotice:
    notice = asyncio.run(store.write(update(version)))
    store.release(version)
    return notice


def read(reader: WeightReader, notice: WeightNotice) -> int:
    with reader.open(notice) as found:
        return checksum(found.tensors.items())


def all_read(
    threads: ThreadPoolExecutor, readers: Sequence[WeightReader], notice: WeightNotice
) -> set[int]:
    told = replace(notice, num_readers=len(readers))
    return set(threads.map(lambda reader: read(reader, told), readers))


def carrier_of(store: RoomStore) -> BroadcastCarrier:
    carrier = store._carrier
    assert isinstance(carrier, BroadcastCarrier)
    return carrier


def group_of(store: RoomStore) -> str:
    formed = carrier_of(store)._formed
    assert formed is not None
    return formed.group.seat.name


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Members of each round that the writer begins to send in, itself included."""
    found: list[int] = []
    whole = Group.broadcast

    def counted(self: Group, memory: Tensor, bucket_bytes: int) -> None:
        if self.seat.rank == 0:
            found.append(self.seat.size)
        whole(self, memory, bucket_bytes)

    monkeypatch.setattr(Group, "broadcast", counted)
    return found


@pytest.fixture
def one_round(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer waits for all to come until the first round has begun, then for none."""
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    whole = Group.broadcast

    def hurried(self: Group, memory: Tensor, bucket_bytes: int) -> None:
        if self.seat.rank == 0:
            monkeypatch.setattr(broadcast, "GATHER_SECONDS", 0.1)
        whole(self, memory, bucket_bytes)

    monkeypatch.setattr(Group, "broadcast", hurried)
    assert not sizes


@pytest.mark.parametrize("transport", ["shared_memory", "files", "network", "broadcast"])
def test_every_transport_brings_the_same_bits(transport: str, tmp_path: Path) -> None:
    directory = {"directory": tmp_path} if transport == "files" else {}
    config = WeightSyncConfig(transport=transport, **directory)  # type: ignore[arg-type]
    channel = build_weight_channel(config, None)
    published = weights(1)
    published["norm"][:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    notice = asyncio.run(channel.store.write(update(1, published)))
    with channel.reader.open(notice) as found:
        assert list(found.tensors) == list(published)
        for name, tensor in published.items():
            arrived = found.tensors[name]
            assert (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
            assert same_bits(arrived, tensor)
        del arrived
    channel.reader.close()
    channel.store.close()


def test_readers_that_are_told_together_get_it_in_one_round_and_keep_their_group(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    names = set()
    for version in (1, 2, 3):
        assert all_read(threads, readers, write(store, version)) == {update(version).checksum}
        names.add(group_of(store))
    assert sizes == [4, 4, 4]
    assert len(names) == 1, "a group is formed once while its members stay the same"


def test_who_comes_alone_gets_the_version_of_now_and_joins_the_next_broadcast(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    first = write(store, 1)
    assert all_read(threads, readers[:2], first) == {first.checksum}
    assert read(readers[2], first) == first.checksum
    second = write(store, 2)
    assert all_read(threads, readers, second) == {second.checksum}
    assert sizes == [3, 2, 4]


def test_who_has_left_is_not_waited_for_in_the_next_broadcast(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    first = write(store, 1)
    assert all_read(threads, readers, first) == {first.checksum}
    second = write(store, 2)
    assert all_read(threads, readers[1:], second) == {second.checksum}
    assert sizes == [4, 3]


def test_what_is_computed_in_the_room_is_sent_from_there_and_what_is_not_sent_is_used_again(
    store: RoomStore, readers: list[BroadcastReader]
) -> None:
    published = weights(1, dtype=torch.float32)
    shapes = {name: tensor.shape for name, tensor in published.items()}
    given_up = store.take(shapes, torch.float32)["wide"].data_ptr()
    room = store.take(shapes, torch.float32)
    assert room["wide"].data_ptr() == given_up
    for name, tensor in published.items():
        room[name].copy_(tensor)
    notice = asyncio.run(store.write(update(1, room)))
    assert read(readers[0], notice) == update(1, published).checksum
    assert store.take(shapes, torch.float32)["wide"].data_ptr() != given_up


def test_one_that_does_not_come_holds_the_others_up_for_a_while_and_no_longer(
    store: RoomStore,
    readers: list[BroadcastReader],
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 0.1)
    notice = replace(write(store, 1), num_readers=3)
    assert read(readers[0], notice) == notice.checksum
    assert sizes == [2]


def test_a_reader_that_is_killed_in_the_middle_is_left_behind_and_the_others_get_the_whole(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    sizes: list[int],
    one_round: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del one_round
    _, reader = made()
    with reader_process(StoppingReader(reader, signal.SIGKILL)) as victim:
        notice = replace(write(store, 1), num_readers=4)
        dying = threads.submit(victim.read, notice)
        found = [threads.submit(read, other, notice) for other in readers]
        assert {future.result() for future in found} == {update(1).checksum}
        with pytest.raises(EOFError):
            dying.result()
        assert victim.process.wait() == -signal.SIGKILL
    assert sizes[0] == 5, "it was there"
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    later = write(store, 2)
    assert all_read(threads, readers, later) == {later.checksum}
    assert sizes[-1] == 4, "and is there no more"


def test_a_reader_that_hangs_in_the_middle_is_left_behind_after_the_deadline(
    threads: ThreadPoolExecutor,
    sizes: list[int],
    one_round: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del one_round
    store, reader = made(seconds=10.0, bucket_bytes=1 << 20)
    # More than the sockets take in by themselves.
    tensors = {"large": torch.arange(1 << 22, dtype=torch.int64)}
    others = [pickle.loads(pickle.dumps(reader)) for _ in range(2)]  # noqa: S301
    with reader_process(StoppingReader(reader, signal.SIGSTOP)) as victim:
        try:
            first = asyncio.run(store.write(update(1, tensors)))
            told = replace(first, num_readers=3)
            hung = threads.submit(victim.read, told)
            found = [threads.submit(read, other, told) for other in others]
            assert {future.result() for future in found} == {first.checksum}
            monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
            later = write(store, 2)
            assert all_read(threads, others, later) == {later.checksum}
        finally:
            victim.process.kill()
        with pytest.raises(EOFError):
            hung.result()
    assert (sizes[0], sizes[-1]) == (4, 3)
    store.close()


def test_a_reader_that_is_killed_before_it_has_joined_is_waited_for_no_longer_than_the_deadline(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    store, reader = made(seconds=10.0)
    others = [pickle.loads(pickle.dumps(reader)) for _ in range(2)]  # noqa: S301
    with reader_process(StoppingReader(reader, signal.SIGKILL, is_in_the_middle=False)) as victim:
        notice = replace(write(store, 1), num_readers=3)
        dying = threads.submit(victim.read, notice)
        found = [threads.submit(read, other, notice) for other in others]
        assert {future.result() for future in found} == {notice.checksum}
        with pytest.raises(EOFError):
            dying.result()
    store.close()


def test_a_writer_that_is_killed_in_the_middle_leaves_readers_without_anything(
    readers: list[BroadcastReader], threads: ThreadPoolExecutor
) -> None:
    with dying_writer() as notice:
        told = replace(notice, num_readers=len(readers))
        found = [threads.submit(read, reader, told) for reader in readers]
        for future in found:
            with pytest.raises(WeightSyncError, match=f"in {MAX_ROUNDS} rounds") as refused:
                future.result()
            assert refused.value.__cause__ is not None, "another process may do better"


def test_what_is_being_sent_is_not_written_over(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    whole = Group.broadcast

    def held_up(self: Group, memory: Tensor, bucket_bytes: int) -> None:
        whole(self, memory[:bucket_bytes], bucket_bytes)
        if self.seat.rank == 0:
            begun.set()
            assert go_on.wait(240.0)
        whole(self, memory[bucket_bytes:], bucket_bytes)

    monkeypatch.setattr(Group, "broadcast", held_up)
    first = write(store, 1)
    reading: Future[int] = threads.submit(read, readers[0], first)
    assert begun.wait(240.0)
    for version in (2, 3, 4):
        write(store, version)
    go_on.set()
    assert reading.result() == first.checksum


def test_memory_is_used_again_and_never_more_than_two_versions_take(store: RoomStore) -> None:
    blocks = set()
    for version in range(1, 7):
        write(store, version)
        carrier = carrier_of(store)
        blocks |= {id(memory) for memory in (*carrier._blocks.values(), *carrier._free)}
        assert len(carrier._blocks) + len(carrier._free) <= 2
    assert len(blocks) == 2


def test_a_version_that_was_given_up_is_refused(
    store: RoomStore, readers: list[BroadcastReader]
) -> None:
    first = write(store, 1)
    write(store, 2)
    with pytest.raises(WeightSyncError, match="version 1 is gone") as refused:
        read(readers[0], first)
    assert refused.value.__cause__ is None


def test_readers_that_wait_hear_that_the_writer_was_closed(
    store: RoomStore,
    readers: list[BroadcastReader],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    notice = replace(write(store, 1), num_readers=2)
    waiting = threads.submit(read, readers[0], notice)
    carrier = carrier_of(store)
    with carrier._changed:
        assert carrier._changed.wait_for(lambda: carrier._guests, 240.0)
    store.close()
    with pytest.raises(WeightSyncError, match="did not arrive"):
        waiting.result()


def test_one_that_gives_up_waiting_is_forgotten(
    store: RoomStore, readers: list[BroadcastReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "GATHER_SECONDS", 240.0)
    monkeypatch.setattr(broadcast, "KEEPALIVE_SECONDS", 0.01)
    _, reader = made()
    notice = replace(write(store, 1), num_readers=2)
    carrier = carrier_of(store)
    with reader_process(reader) as victim, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(victim.read, notice)
        with carrier._changed:
            assert carrier._changed.wait_for(lambda: carrier._guests, 240.0)
        victim.process.kill()
        with pytest.raises(EOFError):
            waiting.result()
        with carrier._changed:
            assert carrier._changed.wait_for(lambda: not carrier._guests, 240.0)
    assert read(readers[0], replace(notice, num_readers=1)) == notice.checksum


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:1/aa", "broadcast://nowhere", "/proc/1/fd/1"])
def test_what_is_no_place_of_a_broadcast_is_refused(place: str) -> None:
    _, reader = made()
    part = replace(_part(), place=place)
    with pytest.raises(WeightSyncError, match="no place of broadcast weights"):
        read(reader, WeightNotice(parts=(part,)))


def _part() -> WeightPart:
    return WeightPart(policy_version=1, checksum=1, place="", num_bytes=BUCKET_BYTES)


def test_an_address_that_is_not_of_this_machine_is_refused_at_once() -> None:
    config = WeightSyncConfig(transport="broadcast", host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"weight_sync\.host"):
        build_weight_channel(config, None)
