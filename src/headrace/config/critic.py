"""`[objective.critic]`: the value head, where advantages are a critic's."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.config.section import Section


class CriticConfig(Section):
    """A linear value head on the policy's last hidden states, and what is made of its values.

    Read with ``objective.advantage`` "gae" and "vtrace" alone.
    """

    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount from one trained token to the next."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """With "gae": 1 trusts returns alone, 0 the value of the next token alone."""
    rho_bar: float = Field(default=1.0, gt=0.0)
    """With "vtrace": bound of the weight of a token's own error; decides what is converged to."""
    c_bar: float = Field(default=1.0, gt=0.0)
    """With "vtrace": bound of the weight that carries later errors back; decides how fast."""
    rho_pg_bar: float = Field(default=1.0, gt=0.0)
    """With "vtrace": bound of the weight in the policy's gradient."""
    value_coefficient: float = Field(default=0.5, gt=0.0)
    """Weight of a token's (V - target)^2 / 2 in the loss."""
    value_clip: float | None = Field(default=None, gt=0.0)
    """With "gae": a value that has moved further than this from that before the step's first
    update has no gradient away from it; null bounds nothing. Needs several minibatches."""
    learning_rate_factor: float = Field(default=10.0, gt=0.0)
    """The head's learning rate over the policy's: it starts at 0 and has everything to learn."""

    @model_validator(mode="after")
    def _bars_in_order(self) -> Self:
        if self.c_bar > self.rho_bar:
            msg = (
                f"c_bar = {self.c_bar:g} is above rho_bar = {self.rho_bar:g}: V-trace assumes that "
                "it is not (arXiv:1802.01561, section 4.1)"
            )
            raise ValueError(msg)
        return self
