"""`[data.train]` and `[data.eval]`: where prompts come from.

A source is told apart by its ``type``. Every row needs a prompt, and an answer where the
verifier compares with one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from headrace.config.section import RecipePath, Section


class _Columns(Section):
    """Fields that every file source has."""

    path: RecipePath
    """The file, or for ``hf_disk`` the directory that ``Dataset.save_to_disk`` wrote."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a list of ``{"role", "content"}`` messages."""
    answer_column: str | None = "answer"
    """Column with the expected answer; null when no verifier compares with one."""
    id_column: str | None = None
    """Column with a stable row id; without it the id is a hash of the row's content."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many rows, from the start; null uses all."""


class JsonlSource(_Columns):
    """One JSON object a line."""

    type: Literal["jsonl"]
    """Tells the kind of source."""


class ParquetSource(_Columns):
    """A Parquet file."""

    type: Literal["parquet"]
    """Tells the kind of source."""


class HuggingFaceDiskSource(_Columns):
    """A Hugging Face dataset written by ``save_to_disk``."""

    type: Literal["hf_disk"]
    """Tells the kind of source."""


class ReasoningGymSource(Section):
    """A procedural task of the reasoning-gym package (extra ``envs``)."""

    type: Literal["reasoning_gym"]
    """Tells the kind of source."""
    task: str = Field(min_length=1)
    """Name of the data set, such as ``chain_sum``."""
    size: int = Field(ge=1)
    """Rows to make."""
    seed: int = 0
    """Seed of the rows. The package makes row i from ``seed + i``, so training and held-out seeds
    closer than ``size`` share rows; shared rows are left out of one of the two and counted."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the task, such as ``min_terms``."""


SourceConfig = Annotated[
    JsonlSource | ParquetSource | HuggingFaceDiskSource | ReasoningGymSource,
    Field(discriminator="type"),
]


class DataConfig(Section):
    """Prompt sources and how a row becomes a prompt."""

    train: SourceConfig
    """Prompts to train on."""
    eval: SourceConfig | None = None
    """Held-out prompts; null trains without evaluation."""
    canaries: SourceConfig | None = None
    """Tasks that cannot be solved, tried at every evaluation and never trained on: one that passes
    sounds an alarm. Rows of the other sources with the same text are left out."""
    template: Literal["chat", "raw"] = "chat"
    """``chat`` renders through the tokenizer's chat template; ``raw`` encodes the text as it is."""
    system_prompt: str | None = None
    """Put before every conversation that has no system message; needs ``template = "chat"``."""
    user_template: str = "{prompt}"
    """The user's turn; ``{prompt}`` stands for the row's prompt when that is text, ``{tests}`` for
    those of its tests that the policy may know, where a verifier runs code."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest rendered prompt."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """``stop`` reports every bad row and ends; ``skip`` counts them and goes on."""
    shuffle: bool = True
    """Draw in a new seeded order every epoch; false keeps the source's order."""


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling: each group without a spread of rewards is replaced by another.

    That is dropped, with its reason in the ledger, and the next prompt drawn in its place, until a
    batch has all its groups.
    """

    max_refills: int = Field(default=10, ge=1)
    """How many times as many groups as can be under way are drawn again for one step at most; after
    that the run stops with a table of the reasons."""
