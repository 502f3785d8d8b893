"""Accounting of the cache: which blocks are held, by how many, and which can be found again.

Holds numbers and no tensors. A block is free, held, or kept: held by nobody, but under a name by
which a later prompt with the same beginning finds it. Owns two facts: a held block is never given
out again, and a name holds for one set of weights only.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class BlockManager:
    """Counts holders of blocks 0 .. num_blocks - 1, ``block_size`` tokens each."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Take every block back, whoever holds it, and forget its name."""
        self.num_touched = 0
        """Blocks 0 .. num_touched - 1 have been given out at some time; memory is for these."""
        self._most_held = 0
        self._holders: dict[int, int] = {}
        self._free: list[int] = []
        """A heap of touched ones: low numbers first, so that what is used lies together."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks under a name that nobody holds, the longest unused first."""
        self._names: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be taken."""
        return self.num_blocks - len(self._holders)

    @property
    def num_held(self) -> int:
        """Blocks that some rollout needs."""
        return len(self._holders)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """Give out ``count`` blocks, each held once; names of kept ones are lost when need be."""
        assert count <= self.num_available, "asked for more blocks than there are"
        self._most_held = max(self._most_held, self.num_held + count)
        taken = [self._take_one() for _ in range(count)]
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def _take_one(self) -> int:
        """Free ones first; then new ones, until as many are kept as were ever held at once."""
        if self._free:
            return heapq.heappop(self._free)
        if self.num_touched < min(self.num_blocks, 2 * self._most_held):
            self.num_touched += 1
            return self.num_touched - 1
        block, _ = self._kept.popitem(last=False)
        del self._blocks[self._names.pop(block)]
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of ``blocks``, which are held or kept."""
        for block in blocks:
            if block not in self._holders:
                del self._kept[block]
            self._holders[block] = self._holders.get(block, 0) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder from each of ``blocks``; those left without one are kept or free.

        The last ones first: a beginning is of more use to others than what follows it, and is
        not found without what comes before.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            del self._holders[block]
            if block in self._names:
                self._kept[block] = None
            else:
                heapq.heappush(self._free, block)

    def find(self, token_ids: Sequence[int]) -> list[int]:
        """Return the blocks that hold the longest known beginning of ``token_ids``, not yet held.

        The last token is never among them: its hidden state is what the next one is sampled from.
        """
        found: list[int] = []
        for name in self._chain(token_ids[:-1]):
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def name(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Make ``blocks``, which hold ``token_ids``, findable; the last one only if it is full."""
        for name, block in zip(self._chain(token_ids), blocks, strict=False):
            # The same tokens may have been computed twice; the first copy keeps the name.
            if name not in self._blocks and block not in self._names:
                self._blocks[name] = block
                self._names[block] = name

    def discard(self, blocks: Iterable[int]) -> list[int]:
        """Make those of ``blocks`` that nobody holds nameless and free; return which these are."""
        unheld = [block for block in blocks if block not in self._holders]
        for block in unheld:
            if block in self._kept:
                del self._kept[block]
                del self._blocks[self._names.pop(block)]
                heapq.heappush(self._free, block)
        return unheld

    def forget_names(self) -> None:
        """Drop every name: what other weights have computed must not be found again."""
        self._names.clear()
        self._blocks.clear()
        for block in self._kept:
            heapq.heappush(self._free, block)
        self._kept.clear()

    def _chain(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Yield the name of each full block: a digest of all tokens up to its end."""
        name = b""
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            tokens = array("q", token_ids[start : start + self.block_size])
            name = hashlib.blake2b(name + tokens.tobytes(), digest_size=16).digest()
            yield name
