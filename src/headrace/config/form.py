"""Components that look at how a completion is written: its form, its length, its script."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config.component import ComponentSection

Script = Literal[
    "arabic",
    "bengali",
    "cyrillic",
    "devanagari",
    "greek",
    "han",
    "hangul",
    "hebrew",
    "hiragana",
    "katakana",
    "latin",
    "tamil",
    "thai",
]
"""A script of Unicode (its Script property)."""


class FormatConfig(ComponentSection):
    """Pays 1 for a completion of the declared form, and 0 for any other."""

    kind: Literal["format"]
    """Tells the kind of component."""
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")], ...] = ()
    """Each must be opened and closed exactly once, in this order, none within another, and hold
    something: ``["think", "answer"]`` asks for ``<think>...</think><answer>...</answer>``."""
    outside: Literal["space", "anything"] = "space"
    """What may stand outside of the tags."""
    pattern: str | None = None
    """Regular expression that the whole completion must match; a dot matches line ends too."""
    prefix: str = ""
    """What the prompt ends with and belongs to the form, such as ``<think>``: put before the
    completion."""
    require_stop: bool = False
    """A form that has an end shows for itself whether it was reached."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            import regex  # noqa: PLC0415 - few recipes have a pattern

            try:
                regex.compile(pattern)
            except regex.error as error:
                msg = f"{pattern!r} is no regular expression: {error}"
                raise ValueError(msg) from error
        return pattern

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.tags and self.pattern is None:
            msg = "tags, pattern: give at least one of them, or every completion has the form"
            raise ValueError(msg)
        if len(set(self.tags)) < len(self.tags):
            msg = f"tags = {list(self.tags)}: names one twice, and each stands exactly once"
            raise ValueError(msg)
        return self


class LengthConfig(ComponentSection):
    """Takes up to 1 for length: 0 up to ``start``, then falling, and -1 from ``limit`` on."""

    kind: Literal["length"]
    """Tells the kind of component."""
    start: int = Field(ge=0)
    """The longest completion that loses nothing; ``limit`` less a buffer is DAPO's overlong
    punishment."""
    limit: int = Field(ge=1)
    """The shortest completion that loses everything."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted."""
    shape: Literal["linear", "cosine"] = "linear"
    """How it falls: in a straight line, or as half a wave, slow at both ends."""
    require_stop: bool = False
    """A cut-off completion is long, and loses for that."""
    decides_pass: bool = False
    """A right answer stays right, however long."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.start >= self.limit:
            msg = f"start = {self.start} must lie below limit = {self.limit}"
            raise ValueError(msg)
        return self


class LanguageConfig(ComponentSection):
    """Takes the share of letters that belong to none of ``scripts``: between 0 and -1."""

    kind: Literal["language"]
    """Tells the kind of component."""
    scripts: tuple[Script, ...] = Field(min_length=1)
    """What letters may be written in. Digits, punctuation and symbols belong to all of them."""
    tolerance: float = Field(default=0.02, ge=0.0, lt=1.0)
    """Nothing is lost up to this share: names and formulas are written in other scripts."""
    require_stop: bool = False
    """A cut-off completion has a script too."""
    decides_pass: bool = False
    """A right answer stays right in any script."""
