"""The order in which prompts are drawn, epoch after epoch.

Invariant (exact coverage): every epoch yields each prompt once, whatever the batch size; the tail
of one epoch is simply drawn into the next batch. The order is a function of seed and epoch, so
there is no position to save: after a kill a new stream yields what the ledger has not settled,
prompts that were in flight included. It settles nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from headrace.data.ledger import Ledger
from headrace.types import Prompt, derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One prompt in one epoch."""

    epoch: int
    """0 for the first."""
    prompt: Prompt

    @property
    def group_id(self) -> str:
        """Unique within a run; what the ledger settles."""
        return f"{self.epoch}/{self.prompt.prompt_id}"


class PromptStream:
    """Draws the prompts that ``ledger`` has not settled. Rewind the ledger before making one."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool,
        num_epochs: int | None,
        ledger: Ledger,
    ) -> None:
        """``num_epochs=None`` goes on for ever; with ``shuffle`` off every epoch is in order."""
        assert prompts, "a source without a usable row is a DataError before this"
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._ledger = ledger
        self._draws = self._all_draws()

    def draw(self) -> Draw | None:
        """Return the next prompt, or None, now and ever after, at the end of the last epoch."""
        return next(self._draws, None)

    def _all_draws(self) -> Iterator[Draw]:
        for epoch in count() if self._num_epochs is None else range(self._num_epochs):
            # Asked when the epoch begins: this stream has drawn nothing of it yet, so whatever is
            # settled was settled before a resume.
            settled = self._ledger.settled(epoch)
            for prompt in self._order(epoch):
                if prompt.prompt_id not in settled:
                    yield Draw(epoch=epoch, prompt=prompt)

    def _order(self, epoch: int) -> Sequence[Prompt]:
        """Sort by a hash of seed, epoch and id: the same on every machine and Python version.

        A prompt's place does not depend on where its row stands in the file.
        """
        if not self._shuffle:
            return self._prompts
        return sorted(
            self._prompts,
            key=lambda prompt: derive_seed(self._seed, "data", epoch, prompt.prompt_id),
        )
