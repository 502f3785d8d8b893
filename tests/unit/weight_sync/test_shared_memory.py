from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sync_lab import DEADLINE, ReaderProcess, published, reader_process, update, weights

from headrace.config import WeightSyncConfig
from headrace.errors import ConfigError, WeightSyncError
from headrace.models.weight_layout import WeightLayout
from headrace.models.weights import checksum, copied_update
from headrace.types import WeightNotice, WeightPart, WeightUpdate
from headrace.weight_sync import StoredWeightSync, WeightChannel, build_weight_channel
from headrace.weight_sync import shared_memory as module
from headrace.weight_sync.blocks import BlockHeader, block_bytes
from headrace.weight_sync.shared_memory import SharedMemoryCarrier, SharedMemoryFetcher
from headrace.weight_sync.store import WholeReader, WholeStore

MEMORY = Path("/dev/shm")  # noqa: S108 - only looked at


@pytest.fixture
def channel() -> Iterator[WeightChannel]:
    made = build_weight_channel(WeightSyncConfig(deadline_seconds=DEADLINE), None)
    yield made
    made.reader.close()
    made.store.close()


def write(channel: WeightChannel, version: int) -> WeightNotice:
    notice = asyncio.run(channel.store.write(update(version)))
    channel.store.release(version)
    return notice


def test_another_process_reads_bit_for_bit_what_was_written(channel: WeightChannel) -> None:
    with reader_process(channel.reader) as process:
        for version in (1, 2, 3):
            notice = write(channel, version)
            assert process.read(notice) == notice.checksum == update(version).checksum


def test_a_notice_is_small_and_travels_as_a_pickle(channel: WeightChannel) -> None:
    notice = write(channel, 1)
    assert pickle.loads(pickle.dumps(notice)) == notice  # noqa: S301 - made here
    assert len(pickle.dumps(notice)) < 500


def test_names_shapes_and_dtypes_arrive_and_nothing_is_copied(channel: WeightChannel) -> None:
    notice = write(channel, 4)
    with channel.reader.open(notice) as found:
        assert found.policy_version == 4
        for name, tensor in weights(4).items():
            assert torch.equal(found.tensors[name], tensor)
            assert found.tensors[name].dtype == tensor.dtype
        maps = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
        address = found.tensors["wide"].data_ptr()
        lines = [line for line in maps if _spans(line, address)]
    assert len(lines) == 1
    assert f"{MEMORY}/" in lines[0]


def _spans(line: str, address: int) -> bool:
    start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
    return start <= address < end


def test_what_is_written_over_what_was_read_does_not_change_the_version_of_now(
    channel: WeightChannel,
) -> None:
    one = write(channel, 1)
    two = asyncio.run(channel.store.write(update(2)))
    # Not released yet: the version before can still be read beside it.
    with channel.reader.open(one) as first, channel.reader.open(two) as second:
        assert checksum(first.tensors.items()) == one.checksum
        assert checksum(second.tensors.items()) == two.checksum


def test_a_writer_waits_for_no_reader_that_was_killed(channel: WeightChannel) -> None:
    notice = write(channel, 1)
    process = ReaderProcess(channel.reader)
    assert process.read(notice, hold=True) == notice.checksum
    process.kill()
    places = {write(channel, version).parts[0].place for version in range(2, 8)}
    assert len(places) == 2, "the segment that it held is used again"


def test_a_segment_that_is_read_is_never_written_over(channel: WeightChannel) -> None:
    one = write(channel, 1)
    with channel.reader.open(one) as held:
        for version in range(2, 9):
            write(channel, version)
            assert checksum(held.tensors.items()) == one.checksum


def test_a_notice_whose_segment_was_used_again_is_refused(channel: WeightChannel) -> None:
    one = write(channel, 1)
    write(channel, 2)
    write(channel, 3)
    with pytest.raises(WeightSyncError, match="version 1 "), channel.reader.open(one):
        pass


def test_readers_that_never_let_go_end_the_wait_by_name() -> None:
    carrier = SharedMemoryCarrier(lock_seconds=0.05)
    store, reader = WholeStore(carrier), WholeReader(SharedMemoryFetcher())
    contexts = []
    for version in (1, 2):
        store.release(version)
        contexts.append(reader.open(asyncio.run(store.write(update(version)))))
        contexts[-1].__enter__()
    store.release(3)
    with pytest.raises(WeightSyncError, match="2 versions in /dev/shm are still read"):
        asyncio.run(store.write(update(3)))
    for context in contexts:
        context.__exit__(None, None, None)
    store.close()


def test_a_block_whose_writing_did_not_end_is_refused() -> None:
    carrier, fetcher = SharedMemoryCarrier(), SharedMemoryFetcher()
    part = carrier.put(header_of(update(1)), update(1).tensors)
    carrier.drop(part)
    room = carrier.room(WeightLayout.of_tensors(weights(2)))
    assert room.segment.place == part.place
    room.segment.unlock()  # as the kernel does when the writer is killed here
    with pytest.raises(WeightSyncError, match="holds no whole weights"), fetcher.fetch(part):
        pass
    room.give_back()
    carrier.close()


def header_of(published: WeightUpdate) -> BlockHeader:
    return BlockHeader(
        policy_version=published.policy_version,
        checksum=published.checksum,
        layout=WeightLayout.of_tensors(published.tensors),
    )


def test_a_segment_that_is_being_written_is_refused_and_not_waited_for() -> None:
    carrier, fetcher = SharedMemoryCarrier(), SharedMemoryFetcher()
    part = carrier.put(header_of(update(1)), update(1).tensors)
    carrier.drop(part)
    room = carrier.room(WeightLayout.of_tensors(weights(2)))
    with pytest.raises(WeightSyncError, match="being written over"), fetcher.fetch(part):
        pass
    room.give_back()
    carrier.close()


WRITER = """
import asyncio, sys
from headrace.config import WeightSyncConfig
from headrace.weight_sync import build_weight_channel
from sync_lab import update
channel = build_weight_channel(WeightSyncConfig(), None)
notice = asyncio.run(channel.store.write(update(1)))
print(notice.parts[0].place, notice.parts[0].num_bytes, flush=True)
sys.stdin.read()
"""


def test_a_writer_that_is_killed_leaves_nothing_and_its_notice_is_refused() -> None:
    before = {entry.name for entry in MEMORY.iterdir()}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        place, size = process.stdout.readline().decode().split()
        held = os.open(place, os.O_RDONLY)
        process.kill()
        process.wait(DEADLINE)
    assert os.fstat(held).st_nlink == 0, "it never had a name"
    os.close(held)
    assert {entry.name for entry in MEMORY.iterdir()} <= before
    part = WeightPart(
        policy_version=1, checksum=update(1).checksum, place=place, num_bytes=int(size)
    )
    reader = WholeReader(SharedMemoryFetcher())
    with (
        pytest.raises(WeightSyncError, match="the process that published it has ended"),
        reader.open(WeightNotice(parts=(part,))),
    ):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a directory of memory")
def test_a_full_directory_of_memory_is_an_error_with_place_and_sizes(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        store = WholeStore(SharedMemoryCarrier(directory=tmp_path))
        asyncio.run(store.write(update(1)))
        large = update(2, {"large": torch.zeros(1 << 20)})
        with pytest.raises(WeightSyncError, match=rf"{tmp_path} is full: .* of its 65536 are free"):
            asyncio.run(store.write(large))
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607 - of every system


def test_room_for_one_version_alone_is_an_error_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = block_bytes(WeightLayout.of_tensors(weights(1)))
    pages = [size + size // 2]
    monkeypatch.setattr(
        module.os,
        "statvfs",
        lambda _: SimpleNamespace(f_frsize=1, f_blocks=3 * size, f_bavail=pages[0]),
    )
    store = WholeStore(SharedMemoryCarrier())
    with pytest.raises(WeightSyncError, match=f"take {size} bytes each and {pages[0]} of its"):
        asyncio.run(store.write(update(1)))
    pages[0] = 2 * size
    for version in (1, 2, 3):
        asyncio.run(store.write(update(version)))
        pages[0] = 0  # its own segments are why
        store.release(version)
    store.close()


def test_a_machine_without_memory_is_an_error_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 100)
    store = WholeStore(SharedMemoryCarrier())
    with pytest.raises(WeightSyncError, match="100 bytes of memory left"):
        asyncio.run(store.write(update(1)))
    store.close()


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    store = WholeStore(SharedMemoryCarrier(directory=tmp_path / "nowhere"))
    with pytest.raises(WeightSyncError, match="nowhere cannot hold published weights"):
        asyncio.run(store.write(update(1)))
    store.close()


def test_weights_by_reference_are_refused_between_processes() -> None:
    with pytest.raises(ConfigError, match='use "auto" or "shared_memory"'):
        build_weight_channel(WeightSyncConfig(transport="memory"), None)


def test_what_is_computed_in_the_stores_own_memory_is_published_without_a_copy(
    channel: WeightChannel,
) -> None:
    assert channel.room is not None
    source = weights(1)
    source.pop("norm")
    shapes = {name: tensor.shape for name, tensor in source.items()}
    places = set()
    for version in (1, 2, 3):
        masters = {name: tensor.float() * version for name, tensor in source.items()}
        room = channel.room.take(shapes, torch.bfloat16)
        published = copied_update(version, masters, room)
        notice = asyncio.run(channel.store.write(published))
        channel.store.release(version)
        room["wide"][0, 0] = 77.0  # what was written is where readers read
        places.add(notice.parts[0].place)
        with channel.reader.open(notice) as found:
            assert float(found.tensors["wide"][0, 0]) == 77.0
            for name, tensor in masters.items():
                same = found.tensors[name] == tensor.bfloat16()
                assert int(same.sum()) >= same.numel() - 1
    assert len(places) == 2


def test_a_room_that_was_not_written_is_used_again_and_others_are_copied(
    channel: WeightChannel,
) -> None:
    assert channel.room is not None
    shapes = {name: tensor.shape for name, tensor in weights(1).items()}
    first = channel.room.take(shapes, torch.bfloat16)
    second = channel.room.take(shapes, torch.bfloat16)
    assert first["wide"].data_ptr() == second["wide"].data_ptr()
    notice = asyncio.run(channel.store.write(update(1)))
    with channel.reader.open(notice) as found:
        assert checksum(found.tensors.items()) == update(1).checksum


class Receiver:
    """Reads each notice at once, and fails as often as it is told to."""

    def __init__(self, channel: WeightChannel, failures: int = 0) -> None:
        self.notices: list[WeightNotice] = []
        self.held: dict[str, torch.Tensor] = {}
        self._channel, self._failures = channel, failures

    async def update_from(self, notice: WeightNotice) -> None:
        self.notices.append(notice)
        if self._failures:
            self._failures -= 1
            msg = "lost what it held"
            raise WeightSyncError(msg)
        with self._channel.reader.open(notice) as found:
            self.held = {name: tensor.clone() for name, tensor in found.tensors.items()}


async def export() -> WeightUpdate:
    return update(5)


def test_a_publication_is_over_once_every_receiver_has_read_it(channel: WeightChannel) -> None:
    receivers = [Receiver(channel), Receiver(channel)]
    asyncio.run(published(StoredWeightSync(export, channel.store, receivers), 5))
    for receiver in receivers:
        assert checksum(receiver.held.items()) == update(5).checksum


def test_a_receiver_that_fails_on_whole_weights_fails_the_publication(
    channel: WeightChannel,
) -> None:
    receivers = [Receiver(channel), Receiver(channel, failures=1)]
    with pytest.raises(WeightSyncError, match="lost what it held"):
        asyncio.run(published(StoredWeightSync(export, channel.store, receivers), 5))
    assert [len(receiver.notices) for receiver in receivers] == [1, 1]


def test_what_every_receiver_has_replaced_is_released(channel: WeightChannel) -> None:
    versions = iter(range(1, 9))

    async def export_next() -> WeightUpdate:
        return update(next(versions))

    receiver = Receiver(channel)
    sync = StoredWeightSync(export_next, channel.store, [receiver])
    for version in range(1, 9):
        asyncio.run(published(sync, version))
    assert len({notice.parts[0].place for notice in receiver.notices}) == 2


def mapped_by_readers() -> int:
    """Return how many segments this process has mapped as readers do."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    return sum(len(f) == 6 and f[5].startswith(f"{MEMORY}/") and f[1][3] == "p" for f in fields)


def test_segments_stay_mapped_and_each_version_is_read_bit_for_bit(channel: WeightChannel) -> None:
    before, addresses = mapped_by_readers(), set()
    for version in range(1, 7):
        notice = write(channel, version)
        with channel.reader.open(notice) as found:
            assert checksum(found.tensors.items()) == notice.checksum
            addresses.add(found.tensors["wide"].data_ptr())
            del found
    assert len(addresses) == 2
    assert mapped_by_readers() - before == 2
    channel.reader.close()
    assert mapped_by_readers() == before


def test_a_reader_lets_go_of_segments_whose_writers_are_gone() -> None:
    before, reader = mapped_by_readers(), WholeReader(SharedMemoryFetcher())
    for version in range(1, 7):
        store = WholeStore(SharedMemoryCarrier())
        notice = asyncio.run(store.write(update(version)))
        with reader.open(notice) as found:
            assert checksum(found.tensors.items()) == notice.checksum
            del found
        store.close()
    assert mapped_by_readers() - before <= 2
    reader.close()


def test_what_a_reader_spoils_before_it_refuses_a_version_is_not_read_again(
    channel: WeightChannel,
) -> None:
    for version in range(1, 7):
        notice = write(channel, version)

        def refuse(notice: WeightNotice = notice) -> None:
            with channel.reader.open(notice) as found:
                assert checksum(found.tensors.items()) == notice.checksum
                found.tensors["wide"].zero_()
                raise WeightSyncError

        with pytest.raises(WeightSyncError):
            refuse()
