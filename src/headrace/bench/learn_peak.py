"""``python -m headrace.bench.learn_peak KIND FILE [TOKENS VOCABULARY HIDDEN]``: one peak.

Writes the MiB that log-probs and their gradients take at their highest, beyond what is there
before, inputs included. KIND is ``tiled`` or ``full``. Apart from `learn`, because a peak is of a
whole process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from headrace.learners.loss import LOGIT_CHUNK
from headrace.objectives.logprobs import linear_logprobs

TOKENS, VOCABULARY, HIDDEN = 8 * 1024, 49152, 576
"""Eight sequences of SmolLM2-135M."""

_RESET_PEAK = "5"
"""What makes Linux forget the highest resident memory so far."""


def tiled(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return [N] as the learner computes them."""
    logprobs, _ = linear_logprobs(hidden, weight, ids, temperature=1.0, chunk_tokens=LOGIT_CHUNK)
    return logprobs


def full(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Return [N] from all logits at once."""
    logprobs = torch.log_softmax(functional.linear(hidden, weight), dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"tiled": tiled, "full": full}


def peak_mib(kind: str, tokens: int, vocabulary: int, hidden_size: int) -> float:
    """Return the peak of one forward and backward pass."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden_size) * 0.05).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,))
    few = slice(0, 8)
    # Threads, workspaces and lazy imports are there before anything counts.
    KINDS[kind](hidden[few], weight[:64], ids[few] % 64).sum().backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    before = _status_mib("VmRSS")
    KINDS[kind](hidden, weight, ids).sum().backward()  # type: ignore[no-untyped-call]
    return _status_mib("VmHWM") - before


def _status_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) / 2**10
    msg = f"/proc/self/status has no {key}"
    raise ValueError(msg)


if __name__ == "__main__":
    kind, path, *sizes = sys.argv[1:]
    found = peak_mib(kind, *(map(int, sizes) if sizes else (TOKENS, VOCABULARY, HIDDEN)))
    Path(path).write_text(str(found), encoding="utf-8")
