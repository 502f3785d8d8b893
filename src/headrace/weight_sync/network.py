"""Blocks over the network, from reader to reader, so that time grows with the log of their number.

The writer hands a block to a few readers at a time. Whoever has it hands it on: the writer, who is
asked first by everybody, tells each reader whom to fetch it from. With ``fan_out`` transfers from
each holder at a time, the number of holders grows ``fan_out`` + 1 times as large while one transfer
takes place. Owns: a reader that cannot fetch from one holder is given another one, the writer the
last of them; a reader that dies holds nobody up, for what it was given ends with its connection.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import WeightSyncError
from headrace.types import WeightPart
from headrace.weight_sync.blocks import (
    Block,
    BlockHeader,
    block_bytes,
    data_start,
    read_block,
    write_header,
)
from headrace.weight_sync.network_wire import Address, Line, Server, WireError, where_from

SCHEME = "tcp://"
ORIGIN = ""
"""The writer, among the holders of a block."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """A block and who else has it."""

    memory: mmap.mmap
    transfers: dict[str, int] = field(default_factory=lambda: {ORIGIN: 0})
    """Holder -> readers that fetch from it now."""

    def take_holder(self, fan_out: int) -> str | None:
        """Return the least busy holder, which then has one reader more; None: all are busy.

        The writer only where no other is as free: it has the next version to write.
        """
        holder = min(self.transfers, key=lambda name: (self.transfers[name], name == ORIGIN))
        if self.transfers[holder] >= fan_out:
            return None
        self.transfers[holder] += 1
        return holder

    def end_transfer(self, holder: str, new: str | None) -> None:
        """Note that a reader of ``holder`` is done; ``new`` is where it hands the block on."""
        if holder in self.transfers:
            self.transfers[holder] -= 1
        if new:
            self.transfers.setdefault(new, 0)


class NetworkCarrier:
    """Serves blocks from memory of this process."""

    def __init__(self, host: str, *, fan_out: int, seconds: float) -> None:
        """``host``: the address to listen at. ``seconds``: longest wait for any message.

        Raises OSError.
        """
        self._fan_out, self._seconds = fan_out, seconds
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._server = Server(host, self._answer, seconds)

    @torch.no_grad()
    def put(self, header: BlockHeader, tensors: Mapping[str, Tensor]) -> WeightPart:
        """See `Carrier`."""
        memory = mmap.mmap(-1, block_bytes(header.layout))
        for name, target in header.layout.views(memory, data_start(header.layout)).items():
            target.copy_(tensors[name])
        write_header(memory, header)
        token = secrets.token_hex(16)
        with self._changed:
            self._held[token] = _Held(memory=memory)
        host, port = self._server.address
        return header.part(f"{SCHEME}{host}:{port}/{token}")

    def drop(self, part: WeightPart) -> None:
        """See `Carrier`. Transfers that have begun come to their end."""
        with self._changed:
            self._held.pop(part.place.rpartition("/")[2], None)
            self._changed.notify_all()

    def close(self) -> None:
        """See `Carrier`."""
        self._server.close()
        with self._changed:
            self._held = {}
            self._changed.notify_all()

    def _answer(self, line: Line) -> None:
        """Give one reader a holder after the other until it has the block."""
        asked = line.hear()
        token, peer = str(asked["token"]), str(asked.get("peer", ""))
        while (found := self._assigned(token)) is not None:
            held, holder = found
            is_done = False
            try:
                line.say(holder=holder, num_bytes=len(held.memory))
                if holder == ORIGIN:
                    line.send(held.memory)
                is_done = line.hear().get("done") is True
            finally:
                # Also where the reader is gone: what it was given is free again.
                self._ended(held, holder, peer if is_done else None)
            if is_done:
                return
            self._distrust(held, holder)
        line.say(gone=True)

    def _assigned(self, token: str) -> tuple[_Held, str] | None:
        """Return the least busy holder; None once there is no such block.

        Waits where all are busy; unblocked by the end of a transfer, or by the deadline.
        """
        deadline = time.monotonic() + self._seconds
        with self._changed:
            while (held := self._held.get(token)) is not None:
                holder = held.take_holder(self._fan_out)
                if holder is not None:
                    return held, holder
                if not self._changed.wait(deadline - time.monotonic()):
                    raise WireError("all holders are busy")  # noqa: EM101, TRY003 - for a log
        return None

    def _ended(self, held: _Held, holder: str, new: str | None) -> None:
        with self._changed:
            held.end_transfer(holder, new)
            self._changed.notify_all()

    def _distrust(self, held: _Held, holder: str) -> None:
        """Send nobody any more to a holder that failed; the writer itself stays."""
        if holder != ORIGIN:
            with self._changed:
                held.transfers.pop(holder, None)


class NetworkFetcher:
    """Fetches blocks, and hands on those it has. Its pickle is how to make another one."""

    def __init__(self, *, seconds: float) -> None:
        """``seconds``: longest wait for any message, and for a holder that is free."""
        self._seconds = seconds
        self._server: Server | None = None
        self._memory: dict[str, mmap.mmap] = {}
        """By token: the last whole block, and what changed since."""

    def __reduce__(self) -> tuple[object, ...]:
        """Sockets and memory stay where they are."""
        return _fetcher, (self._seconds,)

    @contextmanager
    def fetch(self, part: WeightPart) -> Iterator[Block]:
        """See `Fetcher`. Waits for holders; unblocked by their bytes, or by the deadline."""
        address, token = where_from(part, SCHEME, "address of published weights")
        if token not in self._memory:
            try:
                memory = self._fetched(address, token, part)
            except WireError as error:
                msg = f"version {part.policy_version} could not be fetched: {error}"
                raise WeightSyncError(msg) from None
        else:
            memory = self._memory[token]
        block = read_block(memory, part)
        self._keep(token, memory, block)
        yield block

    def close(self) -> None:
        """See `Fetcher`."""
        if self._server is not None:
            self._server.close()
        self._server, self._memory = None, {}

    def _fetched(self, address: Address, token: str, part: WeightPart) -> mmap.mmap:
        origin = Line.to(address, self._seconds)
        try:
            origin.say(token=token, peer=self._own_address(origin))
            memory = mmap.mmap(-1, part.num_bytes)
            while True:
                told = origin.hear()
                if told.get("gone") or told["num_bytes"] != part.num_bytes:
                    msg = f"{part.place} is no longer published"
                    raise WireError(msg)
                if self._arrived(memory, str(told["holder"]), token, origin):
                    # Before it is told of: whoever is sent here finds it.
                    self._memory[token] = memory
                    origin.say(done=True)
                    return memory
                origin.say(done=False)
        finally:
            origin.close()

    def _arrived(self, memory: mmap.mmap, holder: str, token: str, origin: Line) -> bool:
        """Fill ``memory`` from ``holder``; return whether that went well. Raises WireError."""
        if holder == ORIGIN:
            origin.receive(memory)
            return True
        host, _, port = holder.rpartition(":")
        try:
            line = Line.to((host, int(port)), self._seconds)
            try:
                line.say(token=token)
                line.receive(memory)
            finally:
                line.close()
        except WireError:
            return False
        return True

    def _own_address(self, origin: Line) -> str:
        """Return where others fetch from this process: on the side that the writer is reached."""
        if self._server is None:
            host = origin.connection.getsockname()[0]
            self._server = Server(host, self._hand_on, self._seconds)
        host, port = self._server.address
        return f"{host}:{port}"

    def _hand_on(self, line: Line) -> None:
        memory = self._memory.get(str(line.hear().get("token")))
        if memory is not None:
            line.send(memory)

    def _keep(self, token: str, memory: mmap.mmap, block: Block) -> None:
        """Hold what others may still ask for: the last whole version and what came after it."""
        if block.header.base is None:
            self._memory = {token: memory}
        else:
            self._memory[token] = memory


def _fetcher(seconds: float) -> NetworkFetcher:
    return NetworkFetcher(seconds=seconds)
