"""`[learner.lora]`: training a low-rank adapter beside frozen weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.section import RecipePath, Section

LinearName = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ALL_LINEARS: tuple[LinearName, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""Every matrix of a layer."""


class LoraConfig(Section):
    """A low-rank adapter, and nothing else, is trained. There is no dropout."""

    rank: int = Field(default=16, ge=1)
    """Inner dimension r of the two factors."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The product of the factors counts ``alpha / rank`` times."""
    targets: tuple[LinearName, ...] = Field(default=ALL_LINEARS, min_length=1)
    """Matrices that get an adapter, in every layer."""
    start: RecipePath | None = None
    """A directory with an adapter in PEFT's format, of this rank, alpha and targets, to go on from;
    the reference of a KL term is then the model with it. Null starts with a product of 0."""
