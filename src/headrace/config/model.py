"""`[model]`: which policy is trained."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class ModelConfig(Section):
    """The policy that training starts from."""

    path: str = Field(min_length=1)
    """A Hugging Face model directory, or a name: ``nano`` (bundled) or one that `fetch` brings."""
