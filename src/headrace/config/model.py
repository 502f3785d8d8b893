"""`[model]`: which policy is trained."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class ModelConfig(Section):
    """The policy that training starts from."""

    path: str = Field(min_length=1)
    """A name, ``nano`` (bundled) or one that `fetch` brings, or a Hugging Face model directory; a
    relative one means the recipe's own folder, or the current one if absent there."""
