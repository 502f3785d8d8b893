"""The reward of `bench step`: pays every different completion differently.

So every group has a spread and none is left out of the update, which keeps the work of a step the
same for whoever does it. Nothing useful can be learned from it. Imports nothing heavy: each
verifier process imports this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def reward(
    _prompt: str, completion: str, _answer: str | None, _metadata: Mapping[str, object]
) -> float:
    """Return a number in [0, 1) made from every character of ``completion`` and nothing else."""
    digest = hashlib.blake2b(completion.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32
