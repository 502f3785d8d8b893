"""What every component of a verifier has, whatever its kind."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class ComponentSection(Section):
    """Fields that every component has."""

    weight: float = 1.0
    """Factor of this component in the sum."""
    require_stop: bool = True
    """A completion cut off by the token limit is wrong, whatever it says."""
    decides_pass: bool = True
    """Whether it counts in the sum that ``verifier.pass_threshold`` is compared with. A penalty on
    how an answer looks does not make it wrong."""
    gates: tuple[str, ...] = ()
    """Names of components that must be met first: where one is not, this one pays 0 unasked."""
    met_at: float = Field(default=1.0)
    """What it must pay at least to be met, where others name it in their ``gates``."""
