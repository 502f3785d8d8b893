from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from sync_lab import DEADLINE, ReaderProcess, reader_process, update

from headrace.config import DeltaConfig, WeightSyncConfig
from headrace.errors import ConfigError, WeightSyncError
from headrace.models.weights import checksum
from headrace.roles import WeightReader
from headrace.types import WeightNotice
from headrace.weight_sync import WeightChannel, build_weight_channel
from headrace.weight_sync.network import ORIGIN, SCHEME, NetworkCarrier, _Held
from headrace.weight_sync.network_wire import Line, WireError, where_from


def made(**settings: object) -> WeightChannel:
    found = {"transport": "network", "deadline_seconds": DEADLINE, "fan_out": 1, **settings}
    return build_weight_channel(WeightSyncConfig(**found), None)  # type: ignore[arg-type]


@pytest.fixture
def channel() -> Iterator[WeightChannel]:
    channel = made()
    yield channel
    channel.reader.close()
    channel.store.close()


@pytest.fixture
def readers(channel: WeightChannel) -> Iterator[list[WeightReader]]:
    """As many as generators would get, each from the pickle."""
    copies = [pickle.loads(pickle.dumps(channel.reader)) for _ in range(6)]  # noqa: S301
    yield copies
    for reader in copies:
        reader.close()


def write(channel: WeightChannel, version: int) -> WeightNotice:
    notice = asyncio.run(channel.store.write(update(version)))
    channel.store.release(version)
    return notice


def read(reader: WeightReader, notice: WeightNotice) -> int:
    with reader.open(notice) as found:
        return checksum(found.tensors.items())


def carrier_of(channel: WeightChannel) -> NetworkCarrier:
    carrier = channel.store._carrier  # type: ignore[attr-defined]
    assert isinstance(carrier, NetworkCarrier)
    return carrier


def test_another_process_reads_bit_for_bit_what_was_written(channel: WeightChannel) -> None:
    with reader_process(channel.reader) as process:
        for version in (1, 2):
            notice = write(channel, version)
            assert process.read(notice) == update(version).checksum


def test_who_has_the_weights_hands_them_on_and_the_writer_sends_them_once(
    channel: WeightChannel, readers: list[WeightReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    assigned = NetworkCarrier._assigned

    def noted(self: NetworkCarrier, token: str) -> tuple[_Held, str] | None:
        found = assigned(self, token)
        assert found is not None
        asked.append(found[1])
        return found

    monkeypatch.setattr(NetworkCarrier, "_assigned", noted)
    notice = write(channel, 1)
    for reader in readers:
        assert read(reader, notice) == notice.checksum
    assert asked[0] == ORIGIN
    assert ORIGIN not in asked[1:]
    assert read(readers[0], notice) == notice.checksum
    assert len(asked) == len(readers), "what is held is not fetched again"


def test_many_readers_at_once_all_get_it(
    channel: WeightChannel, readers: list[WeightReader]
) -> None:
    with ThreadPoolExecutor(len(readers)) as threads:
        for version in (1, 2, 3):
            notice = write(channel, version)
            found = list(threads.map(lambda reader, n=notice: read(reader, n), readers))
            assert set(found) == {notice.checksum}


@pytest.mark.parametrize("fan_out", [1, 2, 4])
@pytest.mark.parametrize("num_readers", [1, 5, 16, 100])
def test_rounds_of_transfers_grow_with_the_logarithm_of_the_readers(
    fan_out: int, num_readers: int
) -> None:
    held = _Held(memory=None)  # type: ignore[arg-type]
    waiting = [f"reader:{number}" for number in range(num_readers)]
    rounds = 0
    while waiting:
        under_way = []
        while waiting and (holder := held.take_holder(fan_out)) is not None:
            under_way.append((holder, waiting.pop()))
        for holder, reader in under_way:
            held.end_transfer(holder, reader)
        rounds += 1
    assert rounds == math.ceil(math.log(num_readers + 1, fan_out + 1) - 1e-9)


def test_a_holder_that_was_killed_is_replaced_by_another(
    channel: WeightChannel, readers: list[WeightReader]
) -> None:
    notice = write(channel, 1)
    process = ReaderProcess(channel.reader)
    assert process.read(notice) == notice.checksum
    carrier = carrier_of(channel)
    (held,) = carrier._held.values()

    def settled() -> bool:
        return len(held.transfers) == 2 and set(held.transfers.values()) == {0}

    with carrier._changed:
        assert carrier._changed.wait_for(settled, DEADLINE)
    before = set(held.transfers)
    process.kill()
    assert read(readers[0], notice) == notice.checksum
    with carrier._changed:
        assert carrier._changed.wait_for(settled, DEADLINE)
    assert set(held.transfers) & before == {ORIGIN}, "the dead one is asked no more"


def test_a_reader_that_dies_while_it_reads_holds_nobody_up(
    channel: WeightChannel, readers: list[WeightReader]
) -> None:
    notice = write(channel, 1)
    address, token = where_from(notice.parts[0], SCHEME, "address")
    for ending in range(3):
        line = Line.to(address, DEADLINE)
        line.say(token=token, peer="127.0.0.1:9")
        if ending:
            assert line.hear()["holder"] == ORIGIN
        line.close()
    assert read(readers[0], notice) == notice.checksum


def test_what_was_dropped_and_what_never_was_is_refused(
    channel: WeightChannel, readers: list[WeightReader]
) -> None:
    one = write(channel, 1)
    write(channel, 2)
    forged = replace(one.parts[0], place=one.parts[0].place[:-4] + "0000")
    nowhere = replace(one.parts[0], place="tcp://127.0.0.1:9/0")
    nonsense = replace(one.parts[0], place="/dev/null")
    for part, why in (
        (one.parts[0], "is no longer published"),
        (forged, "is no longer published"),
        (nowhere, "cannot be reached"),
        (nonsense, "no address of published weights"),
    ):
        with pytest.raises(WeightSyncError, match=why):
            read(readers[0], WeightNotice(parts=(part,)))


def test_changes_go_from_reader_to_reader_too() -> None:
    channel = made(delta=DeltaConfig(whole_every=3))
    copies = [pickle.loads(pickle.dumps(channel.reader)) for _ in range(2)]  # noqa: S301
    late = pickle.loads(pickle.dumps(channel.reader))  # noqa: S301
    for version in range(1, 6):
        notice = write(channel, version)
        assert {read(reader, notice) for reader in copies} == {notice.checksum}
    assert read(late, notice) == notice.checksum
    for reader in (*copies, late):
        reader.close()
    channel.store.close()


def test_an_address_that_is_not_of_this_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'weight_sync.host = "192\.0\.2\.1": cannot listen'):
        made(host="192.0.2.1")


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[]\n", b'{"token": 1, "peer": {}}\n', b"\xff" * 9000],
)
def test_whoever_else_reaches_the_port_is_hung_up_on_and_weights_go_on(
    channel: WeightChannel, said: bytes
) -> None:
    notice = asyncio.run(channel.store.write(update(1)))
    address, _ = where_from(notice.parts[0], SCHEME, "address")
    line = Line.to(address, DEADLINE)
    line.send(said)
    with suppress(WireError):
        while line.hear().get("gone") is not True:
            pass
    line.close()
    with channel.reader.open(notice) as found:
        assert checksum(found.tensors.items()) == notice.checksum
