"""What `bench step` and its TRL process tell each other, as JSON files.

Apart from `step_trl`, because that one is a program: whoever starts it must not have imported it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlPlan:
    """What the process is to do."""

    model: str
    """Model directory."""
    num_steps: int
    batch_size: int
    """Rollouts of one forward and backward pass; must divide the rollouts of a step."""
    max_tokens: int
    questions: tuple[str, ...]
    is_chat: bool
    """Whether questions go through the model's chat template."""

    def write(self, path: Path) -> None:
        """Write the plan for the process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TrlPlan:
        """Return the plan that was written."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**fields | {"questions": tuple(fields["questions"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlTimes:
    """What it measured."""

    step_seconds: tuple[float, ...]
    completion_tokens: tuple[float, ...]
    """Mean length in each step."""
    no_spread_share: tuple[float, ...]
    """Share of groups in each step whose rewards were all equal."""

    @classmethod
    def read(cls, path: Path) -> TrlTimes:
        """Return what the process wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: tuple(values) for name, values in fields.items()})
