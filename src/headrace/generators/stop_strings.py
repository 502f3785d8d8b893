"""When a stop string ends a rollout: the same for every engine.

It ends with the first token that is sampled and completes one. What was complete before, in a
forced prefix, in tokens that a rollout came in with or before ``min_tokens``, ends nothing, then or
later; what began there and is completed by a sampled token does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, special tokens left out."""


def completes_stop_string(
    completion_ids: Sequence[int], strings: Sequence[str], decode: Decode
) -> bool:
    """Return whether one of ``strings`` ends in what the last of ``completion_ids`` brought.

    Decodes as much of the tail as can hold such a string.
    """
    if not strings:
        return False
    longest = max(len(string) for string in strings)
    window = 2 * longest + 4
    while True:
        tail = completion_ids[-window:]
        text, before = decode(tail), decode(tail[:-1])
        if _completes_any(strings, text, before):
            return True
        # Special tokens and parts of a character add no text, so tokens cannot be counted on:
        # what lies before the newest one must hold a whole stop string and a broken character.
        if window >= len(completion_ids) or len(before) > longest:
            return False
        window *= 2


def _completes_any(strings: Sequence[str], text: str, before: str) -> bool:
    """Return whether one of ``strings`` ends in what ``text`` has and ``before`` had not."""
    ends = [at + len(string) for string in strings if (at := text.rfind(string)) >= 0]
    if not ends:
        return False
    pairs = enumerate(zip(text, before, strict=False))
    alike = next((at for at, (one, other) in pairs if one != other), min(len(text), len(before)))
    return max(ends) > alike
