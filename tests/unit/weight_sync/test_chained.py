from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sync_lab import DEADLINE, published, reader_process, update, weights
from torch import Tensor

from headrace.config import DeltaConfig, WeightSyncConfig
from headrace.errors import WeightSyncError
from headrace.models.weights import checksum, same_bits
from headrace.types import WeightNotice, WeightUpdate
from headrace.weight_sync import StoredWeightSync, WeightChannel, build_weight_channel

EVERY = 4


@pytest.fixture(params=["shared_memory", "files"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WeightChannel]:
    is_files = request.param == "files"
    config = WeightSyncConfig(
        transport=request.param,
        directory=tmp_path if is_files else None,
        delta=DeltaConfig(whole_every=EVERY),
        deadline_seconds=0.2 if is_files else DEADLINE,
    )
    made = build_weight_channel(config, None)
    yield made
    made.reader.close()
    made.store.close()


def version(number: int) -> WeightUpdate:
    """Each version differs from the one before in a few numbers, by a little or by much."""
    tensors = weights(0)
    for past in range(1, number + 1):
        wide = tensors["wide"].view(torch.int16).view(-1)
        wide[past::97] += 1
        wide[past * 7] = -past
        tensors["norm"][past % 7] = past
    return update(number, tensors)


def write(channel: WeightChannel, number: int) -> WeightNotice:
    notice = asyncio.run(channel.store.write(version(number)))
    channel.store.release(number)
    return notice


def read(channel: WeightChannel, notice: WeightNotice) -> dict[str, Tensor]:
    with channel.reader.open(notice) as found:
        assert found.policy_version == notice.policy_version
        assert checksum(found.tensors.items()) == found.checksum == notice.checksum
        return {name: tensor.clone() for name, tensor in found.tensors.items()}


def test_every_version_arrives_bit_for_bit_whole_or_as_changes(channel: WeightChannel) -> None:
    kinds = []
    for number in range(1, 11):
        notice = write(channel, number)
        kinds.append(len(notice.parts))
        found = read(channel, notice)
        assert all(same_bits(found[name], t) for name, t in version(number).tensors.items())
    assert kinds == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_a_reader_that_starts_late_or_missed_some_catches_up(channel: WeightChannel) -> None:
    fresh = pickle.dumps(channel.reader)
    read(channel, write(channel, 1))
    write(channel, 2)
    notice = write(channel, 3)
    read(channel, notice)
    with reader_process(pickle.loads(fresh)) as process:  # noqa: S301 - made here
        assert process.read(notice) == version(3).checksum
        write(channel, 4)
        write(channel, 5)
        assert process.read(write(channel, 6)) == version(6).checksum


def test_changes_are_small(channel: WeightChannel) -> None:
    notice = [write(channel, number) for number in (1, 2)][-1]
    whole, changes = (part.num_bytes for part in notice.parts)
    large = update(3, {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)})
    asyncio.run(channel.store.write(large))
    moved = large.tensors["w"].clone()
    moved[::200] = 1e-3
    parts = asyncio.run(channel.store.write(update(4, {"w": moved}))).parts
    assert changes <= whole
    assert parts[-1].num_bytes < 0.02 * parts[0].num_bytes


def test_a_version_of_other_shapes_or_one_that_goes_back_is_whole(channel: WeightChannel) -> None:
    write(channel, 1)
    other = asyncio.run(channel.store.write(update(2, {"w": torch.ones(3)})))
    assert len(other.parts) == 1
    assert set(read(channel, other)) == {"w"}
    again = asyncio.run(channel.store.write(version(1)))
    assert len(again.parts) == 1, "as after a learner was revived"
    read(channel, again)


def test_a_change_that_rests_on_other_bits_is_refused_until_it_is_published_whole(
    channel: WeightChannel,
) -> None:
    first, second = (write(channel, number) for number in (1, 2))
    read(channel, first)
    forged = replace(second, parts=(replace(second.parts[0], checksum=7), second.parts[1]))
    with pytest.raises(WeightSyncError, match="where version 1 with 7 was told of"):
        read(channel, forged)
    alone = WeightNotice(parts=second.parts[1:])
    with pytest.raises(WeightSyncError, match="holds nothing; publish it whole"):
        read(channel, alone)
    whole = asyncio.run(channel.store.write(version(3), is_whole=True))
    assert len(whole.parts) == 1
    read(channel, whole)


def test_a_change_of_another_first_version_is_not_added(channel: WeightChannel) -> None:
    first, second = (write(channel, number) for number in (1, 2))
    others = {**version(1).tensors, "norm": torch.zeros(7)}
    config = WeightSyncConfig(delta=DeltaConfig(whole_every=EVERY))
    other = build_weight_channel(config, None).store
    stranger = asyncio.run(other.write(update(1, others)))
    mixed = WeightNotice(parts=(*stranger.parts, *second.parts[1:]))
    if type(channel.store._carrier) is type(other._carrier):  # type: ignore[attr-defined]
        with pytest.raises(WeightSyncError, match="this reader holds version 1; publish it whole"):
            read(channel, mixed)
    other.close()
    assert first.checksum != stranger.checksum


def test_a_reader_whose_copy_was_damaged_is_healed_by_a_whole_version(
    channel: WeightChannel,
) -> None:
    numbers = iter((1, 2, 3))
    receiver = Receiver(channel)

    async def export() -> WeightUpdate:
        return version(next(numbers))

    sync = StoredWeightSync(export, channel.store, [receiver])
    asyncio.run(published(sync, 1))
    channel.reader._held.tensors["wide"][0, 0] = 123.0  # type: ignore[attr-defined]
    asyncio.run(published(sync, 2))
    assert receiver.parts == [1, 2, 1]
    assert receiver.held == version(2).checksum
    asyncio.run(published(sync, 3))
    assert receiver.parts == [1, 2, 1, 2], "and then changes are enough again"


def test_what_is_published_once_more_is_the_version_that_was_not_read_whatever_came_since(
    channel: WeightChannel,
) -> None:
    receiver, gate = Receiver(channel), asyncio.Event()
    masters = dict(version(1).tensors)
    numbers = iter((1, 2))

    async def export() -> WeightUpdate:
        return update(next(numbers), masters)

    async def wait_and_read(notice: WeightNotice) -> None:
        await gate.wait()
        await read_now(notice)

    async def main() -> int:
        sync = StoredWeightSync(export, channel.store, [receiver])
        await published(sync, 1)
        receiver.update_from = wait_and_read  # type: ignore[method-assign]
        channel.reader._held.tensors["wide"][0, 0] = 123.0  # type: ignore[attr-defined]
        masters["wide"][1, 1] += 1  # so little that it is published as a change
        expected = checksum(masters.items())
        bringing = asyncio.ensure_future(await sync.publish(2))
        masters["wide"].add_(1)  # the learner's next step
        gate.set()
        await bringing
        return expected

    read_now = receiver.update_from
    expected = asyncio.run(main())
    assert receiver.parts == [1, 2, 1]
    assert receiver.held == expected


class Receiver:
    """Judges what it reads by its checksum, as a generator does."""

    def __init__(self, channel: WeightChannel) -> None:
        self.parts: list[int] = []
        self.held = 0
        self._channel = channel

    async def update_from(self, notice: WeightNotice) -> None:
        self.parts.append(len(notice.parts))
        with self._channel.reader.open(notice) as found:
            self.held = checksum(found.tensors.items())
            if self.held != found.checksum:
                msg = "wrong checksum"
                raise WeightSyncError(msg)


def test_a_write_that_fails_leaves_nothing_that_the_next_one_rests_on(
    channel: WeightChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(channel, write(channel, 1))
    carrier = channel.store._carrier  # type: ignore[attr-defined]

    def full(*_: object) -> None:
        msg = "full"
        raise WeightSyncError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(type(carrier), "put", full)
        with pytest.raises(WeightSyncError, match="full"):
            asyncio.run(channel.store.write(version(2)))
    notice = write(channel, 3)
    assert len(notice.parts) == 1
    read(channel, notice)


def test_old_chains_are_given_back(channel: WeightChannel, tmp_path: Path) -> None:
    for number in range(1, 3 * EVERY + 1):
        write(channel, number)
    carrier = channel.store._carrier  # type: ignore[attr-defined]
    held: Callable[[], int] = lambda: len(  # noqa: E731 - of either carrier
        carrier._held if hasattr(carrier, "_held") else carrier._used
    )
    assert held() == EVERY
    write(channel, 3 * EVERY + 1)
    assert held() == 1
    channel.store.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_life_before_had_written_goes_and_takes_nothing_of_now_with_it(
    channel: WeightChannel,
) -> None:
    """A learner that is started again publishes versions, whole ones among them, once more."""
    fresh = pickle.dumps(channel.reader)
    for number in range(1, EVERY + 1):
        write(channel, number)
    # The first life ends within the publication of a whole version.
    asyncio.run(channel.store.write(version(EVERY + 1)))
    for first in (2, 3, 4):
        for number in range(first, first + 2 * EVERY):
            notice = write(channel, number)
            read(channel, notice)
            newcomer = pickle.loads(fresh)  # noqa: S301 - our own
            with newcomer.open(notice) as found:  # it reads all that the notice names
                assert checksum(found.tensors.items()) == notice.checksum
            newcomer.close()
    carrier = channel.store._carrier  # type: ignore[attr-defined]
    held = carrier._held if hasattr(carrier, "_held") else carrier._used
    assert len(held) <= EVERY
