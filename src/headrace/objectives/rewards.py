"""Terms that training adds to a verified reward. Pure numbers: one rollout at a time."""

from __future__ import annotations


def overlong_penalty(
    length: int, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> float:
    """Return what a completion of ``length`` tokens loses for its length: in [-penalty, 0].

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): 0 up to
    ``max_tokens - buffer_tokens``, from there linearly down to ``-penalty`` at ``max_tokens``, and
    no further. 1 <= ``buffer_tokens`` <= ``max_tokens``.
    """
    excess = length - (max_tokens - buffer_tokens)
    return -penalty * min(max(excess / buffer_tokens, 0.0), 1.0)
