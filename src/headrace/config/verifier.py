"""`[verifier]`: what a rollout is paid for.

A verifier is a weighted sum of components, each told apart by its ``kind``.
"""

from __future__ import annotations

import graphlib
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headrace.config.code import CodeConfig
from headrace.config.component import ComponentSection
from headrace.config.form import FormatConfig, LanguageConfig, LengthConfig
from headrace.config.judge import JudgeConfig, RewardModelConfig, RubricConfig
from headrace.config.remote import RemoteConfig
from headrace.config.sandbox import SandboxConfig
from headrace.config.section import Section, beside_recipe

Extraction = Literal["whole", "after_last_marker", "last_number", "final_number", "boxed"]
"""Which part of a completion is its answer; docs/VERIFIERS.md has each rule with examples."""


AnswerType = Literal[
    "auto", "number", "fraction", "quantity", "expression", "equation", "interval", "set", "tuple",
    "matrix", "choice", "text",
]  # fmt: skip
"""What an expected answer is; docs/VERIFIERS.md has what each accepts."""

UnitRule = Literal["same", "convert", "ignore"]
"""What a unit other than the expected one means."""


AnswerForm = Literal["any", "worked", "final"]
"""Whether an answer may leave work to its reader that the expected one has done."""


class ExactConfig(ComponentSection):
    """Pays 1 for the expected text, character by character."""

    kind: Literal["exact"]
    """Tells the kind of component."""
    extract: Extraction = "whole"
    """Which part of the completion is compared."""
    marker: str = Field(default=":", min_length=1)
    """Used by ``after_last_marker``; a completion without it is compared whole."""
    strip: bool = True
    """Ignore white space around both sides, and write line ends as newlines."""


class NumericConfig(ComponentSection):
    """Pays 1 for a number equal to the expected one."""

    kind: Literal["numeric"]
    """Tells the kind of component."""
    extract: Extraction = "final_number"
    """Which part of the completion is read as a number."""
    marker: str = Field(default=":", min_length=1)
    """Used by ``after_last_marker``."""
    absolute_tolerance: float = Field(default=0.0, ge=0.0)
    """Largest difference that still counts as equal; 0 compares exactly, as fractions."""
    relative_tolerance: float = Field(default=0.0, ge=0.0)
    """The same, as a share of the expected number."""


class MathConfig(ComponentSection):
    """Pays 1 for an answer that means the same as the expected one."""

    kind: Literal["math"]
    """Tells the kind of component."""
    extract: Literal["answer", "boxed", "whole"] = "answer"
    """``boxed``: the last \\boxed{}; ``answer``: that, else the text after the last "answer is" or
    "answer:", else the last line; ``whole``: the completion."""
    answer_type: AnswerType = "auto"
    """What the expected answers are; ``auto`` goes by how each is written."""
    answer_type_column: str | None = None
    """Column of the data that declares a row's own answer type; null there means
    ``answer_type``."""
    form: AnswerForm = "worked"
    """``worked``: an answer that is left to work out and has no numbers but the task's, such as
    12*34 for what asks for 12*34, is wrong, unless the expected one is left so, too; ``final``: one
    that is left to work out is, whatever its numbers; ``any``: it is right where it is equal."""
    units: UnitRule = "same"
    """``same``: an answer's unit is the expected one's, or left out; ``convert``: or one that
    converts into it; ``ignore``: whatever it is. An expected answer without a unit allows any."""
    absolute_tolerance: float = Field(default=0.0, ge=0.0)
    """Largest difference of two numbers that still counts as equal; 0 compares exactly."""
    relative_tolerance: float = Field(default=0.0, ge=0.0)
    """The same, as a share of the expected number; the larger of the two is allowed."""
    timeout_seconds: float = Field(default=3.0, gt=0.0, le=600.0)
    """Time for one answer; after that its process is killed and the rollout is not scored.
    Input that could take that long by design is refused before, and is wrong."""
    memory_mib: int = Field(default=1024, ge=256)
    """Address space of a grading process."""
    num_processes: int = Field(default=2, ge=1)
    """Grading processes side by side."""


class FunctionConfig(ComponentSection):
    """Pays what a Python function returns, called in its own processes.

    ``def reward(prompt: str, completion: str, answer: str | None, metadata: dict) -> float | None``
    """

    kind: Literal["function"]
    """Tells the kind of component."""
    path: str = Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")
    """``package.module:function`` or ``path/to/file.py:function``."""
    require_stop: bool = False
    """Most reward functions want to see cut-off completions too."""
    timeout_seconds: float = Field(default=10.0, gt=0.0, le=3600.0)
    """Time for one call; after that its process is killed and the rollout is not scored."""
    failure_reward: float | None = Field(default=None, ge=-1e6, le=1e6)
    """Paid where the function raises, takes too long or runs out of memory; null
    leaves the rollout out and counts a failure. A completion may be why: a policy that finds what
    breaks the function is not left out for it where this is the least that the function pays."""
    memory_mib: int = Field(default=4096, ge=256)
    """Address space of a process."""
    num_processes: int = Field(default=4, ge=1)
    """Processes side by side."""

    @field_validator("path", mode="after")
    @classmethod
    def _file_beside_recipe(cls, path: str, info: ValidationInfo) -> str:
        module, _, name = path.partition(":")
        return f"{beside_recipe(Path(module), info)}:{name}" if module.endswith(".py") else path


ComponentConfig = Annotated[
    ExactConfig
    | NumericConfig
    | MathConfig
    | FunctionConfig
    | CodeConfig
    | FormatConfig
    | LengthConfig
    | LanguageConfig
    | JudgeConfig
    | RubricConfig
    | RewardModelConfig,
    Field(discriminator="kind"),
]


class VerifierConfig(Section):
    """What a rollout is paid for."""

    components: dict[str, ComponentConfig] = Field(min_length=1)
    """Name -> component. The reward is the sum of weight times component."""
    pass_threshold: float = 1.0
    """A sum at or above this, of the components that decide it, counts as solved in pass@k and in
    the outcome."""
    max_failed_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """Stop the run when more than this share of a whole batch's rollouts could not be scored."""
    remote: RemoteConfig | None = None
    """Servers that run programs in isolation; null runs them on this machine."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where code that a policy wrote is run."""

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if all(component.weight == 0.0 for component in self.components.values()):
            msg = "verifier.components: all have weight 0, so no reward could ever differ"
            raise ValueError(msg)
        if not any(component.decides_pass for component in self.components.values()):
            msg = (
                "verifier.components: all have decides_pass = false, so nothing could ever pass; "
                "let the component that knows right from wrong decide"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _gates_lead_somewhere(self) -> Self:
        for name, component in self.components.items():
            for gate in component.gates:
                if gate not in self.components:
                    msg = (
                        f"verifier.components.{name}.gates names {gate!r}, which is no component; "
                        f"allowed: {', '.join(sorted(self.components))}"
                    )
                    raise ValueError(msg)
        try:
            graphlib.TopologicalSorter(self.gates).prepare()
        except graphlib.CycleError as error:
            circle = " -> ".join(error.args[1])
            msg = (
                f"verifier.components: gates go round in a circle ({circle}); take one of them out"
            )
            raise ValueError(msg) from error
        return self

    @property
    def gates(self) -> dict[str, tuple[str, ...]]:
        """Component -> the components that must be met first."""
        return {name: component.gates for name, component in self.components.items()}
