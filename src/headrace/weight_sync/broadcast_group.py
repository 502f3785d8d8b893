"""One torch.distributed process group: the writer, which is its rank 0, and readers of one moment.

Owns: every wait of a group ends after a deadline, and a member that dies ends what the others wait
for, since its connections end with it. A group that failed once is of no more use: who is left
forms another one. No group here is torch's default one, so that a process may have others.
"""

from __future__ import annotations

import datetime as dt
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it documents it there
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from headrace.weight_sync.network_wire import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A process's place in a group."""

    name: str
    rank: int
    size: int


class Meeting:
    """The store at which processes find each other; it listens at one address alone."""

    def __init__(self, host: str, seconds: float) -> None:
        """Listen at ``host``, at a port of the system's. Raises OSError."""
        listener = socket.create_server((host, 0), backlog=128)
        self.address: Address = listener.getsockname()[:2]
        # By itself the store would listen at every address of the machine.
        self.store = TCPStore(
            host,
            self.address[1],
            None,
            is_master=True,
            timeout=dt.timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def meeting_at(address: Address, seconds: float) -> Store:
    """Return the store of a `Meeting` elsewhere. Raises RuntimeError where it cannot be reached."""
    return TCPStore(
        *address,
        None,
        is_master=False,
        timeout=dt.timedelta(seconds=seconds),
        wait_for_workers=False,
    )


class Group:
    """A process's end of a group, for one thread."""

    def __init__(self, store: Store, seat: Seat, own_host: str, seconds: float) -> None:
        """Return once all members are connected; ``own_host``: where they reach this process.

        Waits for them; unblocked by the last one, or after ``seconds``. Raises RuntimeError.
        """
        self.seat = seat
        # torch has no public name and no types for these.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - see above
        options._devices = [gloo.create_device(hostname=own_host)]  # noqa: SLF001 - see above
        options._timeout = dt.timedelta(seconds=seconds)  # noqa: SLF001 - see above
        self._group: Any = gloo(PrefixStore(seat.name, store), seat.rank, seat.size, options)

    def broadcast(self, memory: Tensor, bucket_bytes: int) -> None:
        """Have ``memory`` [bytes] of every member hold what that of rank 0 holds.

        In buckets, each sent from where it lies and received where it belongs. Waits for each;
        unblocked by the other members, by the death of one, or by the deadline. Raises RuntimeError
        where not all of it came; then it holds nothing that may be read.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            for bucket in torch.split(memory, bucket_bytes):
                # One at a time: with a second under way, who fails at the first could not leave
                # before the deadline. Each goes on once it has handed its bucket on.
                self._group.broadcast([bucket], options).wait()
        except RuntimeError:
            # Connections end now, and not when the last one lets go of this error and its frames:
            # by their end the others hear of it.
            self._group = None
            raise
