"""The base of every section of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo


class Section(BaseModel):
    """Frozen, strict, and closed: an unknown key is an error. Every field has a docstring."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


def beside_recipe(path: Path, info: ValidationInfo) -> Path:
    """Read a relative path from the recipe's folder, or else from the current one."""
    base = (info.context or {}).get("base")
    if path.is_absolute() or base is None:
        return path
    beside: Path = base / path
    return beside if beside.exists() else path.absolute()


RecipePath = Annotated[Path, AfterValidator(beside_recipe)]
"""A path; relative ones mean the recipe's own folder, or the current one if absent there."""
