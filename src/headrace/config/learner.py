"""`[learner]`: how the policy is updated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.lora import LoraConfig
from headrace.config.parallel import ParallelConfig
from headrace.config.section import Section

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
"""Share of a moment that is kept at an update; at 1 nothing new would ever come in."""


class OptimizerConfig(Section):
    """AdamW over fp32 master weights."""

    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak of the schedule."""
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    """Decay of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled; not applied to norms and biases."""
    max_gradient_norm: float = Field(default=1.0, gt=0.0)
    """The global norm is clipped to this."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; ``linear`` and ``cosine`` reach 0 at the run's last planned update."""
    num_warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the rate rises linearly from 0."""


class LearnerConfig(Section):
    """The learner: precision, micro-batches and guards."""

    compute_dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Of matrix products; masters and sums stay fp32. ``auto``: bfloat16 where it is native.
    ``float16``, with ``generator.dtype`` the same, is the remedy of arXiv:2510.26788 for log-probs
    that differ between the two."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates a batch is split into; needs ``max_staleness >= num_minibatches - 1``."""
    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass; a longer group gets its own."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone for the backward pass, and compute the layer again there: a
    third more work, and several times less memory for activations."""
    rehearsal: Literal["auto", "always", "never"] = "auto"
    """Whether the largest micro-batch that the settings allow is tried before the first step, and
    thrown away, so that a lack of memory shows at once. ``auto``: on a CUDA device; a processor
    that lacks memory ends the process instead of refusing."""
    max_nonfinite_steps: int = Field(default=5, ge=1)
    """Stop after so many steps in a row with a non-finite gradient."""
    max_no_signal_steps: int = Field(default=20, ge=1)
    """Stop after so many steps in a row in which no group had a spread of rewards."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks that make each step together."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter and freeze all other weights; null trains them all."""
