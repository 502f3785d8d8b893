from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sync_lab import DEADLINE, ReaderProcess, reader_process, update, weights

from headrace.config import WeightSyncConfig
from headrace.errors import WeightSyncError
from headrace.models.weights import checksum
from headrace.types import WeightNotice
from headrace.weight_sync import WeightChannel, build_weight_channel


def channel_in(directory: Path, deadline: float = DEADLINE) -> WeightChannel:
    config = WeightSyncConfig(transport="files", directory=directory, deadline_seconds=deadline)
    return build_weight_channel(config, None)


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[WeightChannel]:
    made = channel_in(tmp_path, 0.2)
    yield made
    made.store.close()


def write(channel: WeightChannel, version: int) -> WeightNotice:
    return asyncio.run(channel.store.write(update(version)))


def test_another_process_reads_bit_for_bit_what_was_written(channel: WeightChannel) -> None:
    with reader_process(channel.reader) as process:
        for version in (1, 2):
            notice = write(channel, version)
            assert process.read(notice) == update(version).checksum
            channel.store.release(version)


def test_a_file_stays_until_it_is_released_and_for_who_has_it_open(
    channel: WeightChannel, tmp_path: Path
) -> None:
    one, _two = write(channel, 1), write(channel, 2)
    process = ReaderProcess(channel.reader)
    assert process.read(one, hold=True) == one.checksum
    with channel.reader.open(one) as held:
        channel.store.release(2)
        assert checksum(held.tensors.items()) == one.checksum
    process.kill()
    assert len(list(tmp_path.glob("*/*.weights"))) == 1
    with pytest.raises(WeightSyncError, match="version 1 is gone"), channel.reader.open(one):
        pass


def test_files_of_a_life_that_was_taken_back_go_and_none_of_now_goes_with_them(
    channel: WeightChannel, tmp_path: Path
) -> None:
    for version in (3, 4, 5, 3, 4, 5, 3):  # a learner that died twice after version 5
        notice = write(channel, version)
        channel.store.release(version)
        assert len(list(tmp_path.glob("*/*.weights"))) == 1
        with channel.reader.open(notice) as found:
            assert checksum(found.tensors.items()) == update(version).checksum


def test_a_reader_waits_for_a_file_that_does_not_show_yet(tmp_path: Path) -> None:
    channel = channel_in(tmp_path)
    notice = write(channel, 1)
    path = Path(notice.parts[0].place)
    hidden = path.rename(path.with_name("hidden"))
    timer = threading.Timer(0.2, lambda: hidden.rename(path))
    timer.start()
    with channel.reader.open(notice) as found:
        assert checksum(found.tensors.items()) == notice.checksum
    timer.join()
    channel.store.close()


def test_a_file_that_was_cut_short_or_altered_in_its_head_is_refused(
    channel: WeightChannel,
) -> None:
    notice = write(channel, 1)
    path = Path(notice.parts[0].place)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightSyncError, match="version 1 is gone"), channel.reader.open(notice):
        pass
    path.write_bytes(b"nonsense" + whole[8:])
    with (
        pytest.raises(WeightSyncError, match="holds no whole weights"),
        channel.reader.open(notice),
    ):
        pass
    path.write_bytes(whole[:30] + b"?" + whole[31:])
    with pytest.raises(WeightSyncError, match="damaged header"), channel.reader.open(notice):
        pass
    short = replace(notice.parts[0], num_bytes=len(whole) // 2)
    path.write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(WeightSyncError, match=r"of the \d+ bytes of version 1"),
        channel.reader.open(WeightNotice(parts=(short,))),
    ):
        pass


WRITER = """
import asyncio, sys
from pathlib import Path
from headrace.weight_sync import build_weight_channel
from headrace.weight_sync import files
from headrace.config import WeightSyncConfig
from sync_lab import update
config = WeightSyncConfig(transport="files", directory=Path(sys.argv[1]))
channel = build_weight_channel(config, None)
asyncio.run(channel.store.write(update(1)))
write = files._write
def half(path, header, tensors):
    write(path, header, tensors)
    print("half", flush=True)
    sys.stdin.read()
files._write = half
asyncio.run(channel.store.write(update(2)))
"""


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_of_a_living_one(
    tmp_path: Path,
) -> None:
    living = channel_in(tmp_path)
    notice = write(living, 7)
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.kill()
        process.wait(DEADLINE)
    assert len(list(tmp_path.iterdir())) == 2
    assert len(list(tmp_path.glob("*/*.weights"))) == 2, "what was half written has no such name"
    after = channel_in(tmp_path)
    write(after, 1)
    assert len(list(tmp_path.iterdir())) == 2
    with living.reader.open(notice) as found:
        assert checksum(found.tensors.items()) == notice.checksum
    living.store.close()
    after.store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a directory of memory")
def test_a_full_directory_is_an_error_with_place_and_sizes(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        channel = channel_in(tmp_path)
        large = update(1, {"large": torch.zeros(1 << 20)})
        with pytest.raises(WeightSyncError, match=rf"{tmp_path} is full: a published version"):
            asyncio.run(channel.store.write(large))
        assert asyncio.run(channel.store.write(update(2))).policy_version == 2
        channel.store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)  # noqa: S607 - of every system


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="ascii")
    channel = channel_in(tmp_path / "file" / "below")
    with pytest.raises(WeightSyncError, match="below cannot hold published weights"):
        write(channel, 1)


def test_weights_of_every_kind_arrive(channel: WeightChannel) -> None:
    kinds = {f"{dtype}": tensor.to(dtype) for dtype in KINDS for tensor in [weights(0)["wide"]]}
    kinds["turned"] = torch.arange(12.0).view(3, 4).t()
    notice = asyncio.run(channel.store.write(update(1, kinds)))
    with channel.reader.open(notice) as found:
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in kinds.items())


KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8)
