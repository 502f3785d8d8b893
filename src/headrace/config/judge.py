"""Components that a model scores: a judge, a judge with a rubric, a reward model."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from headrace.config.component import ComponentSection
from headrace.config.section import RecipePath, Section

CriterionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
REASON = "reason"
"""Key of a judge's answer in which it argues; no criterion may be called so."""


def _endpoint_url(url: str) -> str:
    """Return ``url`` without a slash at its end. Raises ValueError if no endpoint can be there.

    What comes before an @ is a secret and has no place in a recipe.
    """
    msg = "give http://HOST:PORT/PATH or https://..., up to what comes before /chat/completions"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(msg) from error
    beyond = parts.query or parts.fragment or "@" in parts.netloc
    beyond = beyond or parts.path.rstrip("/").endswith("/chat/completions")
    plain = url.isascii() and url.isprintable() and " " not in url
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or port == 0
        or beyond
        or not plain
    ):
        raise ValueError(msg)
    return url.rstrip("/")


class EndpointSection(ComponentSection):
    """Fields of every component that asks a language model over HTTP."""

    url: Annotated[str, AfterValidator(_endpoint_url)]
    """Root of an OpenAI-compatible interface, such as ``http://127.0.0.1:8000/v1``."""
    model: str = Field(min_length=1)
    """Name of the model there."""
    api_key_variable: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the key; the key itself appears in no recipe, no log and no
    run directory."""
    votes: int = Field(default=1, ge=1, le=64)
    """How many times a completion is judged."""
    rule: Literal["majority", "mean", "unanimous"] = "majority"
    """How votes become one: what more than half of them say; their mean, if more than half can be
    read; what all of them say. Where the rule decides nothing, the rollout is not scored; where the
    completion is why, it is worth 0."""
    temperature: float | None = Field(default=None, ge=0.0, le=10.0)
    """Of the judge's sampling; null leaves it to the endpoint."""
    max_tokens: int = Field(default=1024, ge=16)
    """Of one answer, its reasons included."""
    response_format: Literal["auto", "json_schema", "json_object", "none"] = "auto"
    """How the endpoint is held to JSON. ``auto``: by a schema, or by nothing but words once the
    endpoint has refused that. An answer is checked in any case."""
    sees: Literal["answer", "whole"] = "answer"
    """``answer`` leaves out what stands in ``<think>``."""
    uses_answer: bool = False
    """Show the judge the expected answer too."""
    max_characters: int = Field(default=40_000, ge=1)
    """A completion longer than this is worth 0: nobody could judge it."""
    timeout_seconds: float = Field(default=60.0, gt=0.0, le=3600.0)
    """For one vote, repetitions included; what comes later is not scored."""
    max_retries: int = Field(default=4, ge=0, le=100)
    """Times that a question is asked again when the endpoint was busy or the connection broke."""
    max_concurrent: int = Field(default=16, ge=1)
    """Questions open at once; the others wait."""

    @model_validator(mode="after")
    def _votes_can_differ(self) -> Self:
        if self.votes > 1 and self.temperature == 0.0:
            msg = (
                f"votes = {self.votes} with temperature = 0: all votes would be the same one; set "
                "votes = 1 or a temperature"
            )
            raise ValueError(msg)
        return self


class JudgeConfig(EndpointSection):
    """Pays the points that a language model gives, as a share of all there are."""

    kind: Literal["judge"]
    """Tells the kind of component."""
    question: str = Field(min_length=1)
    """What the judge decides, such as "Is the answer right?"."""
    points: int = Field(default=1, ge=1, le=100)
    """Points at most: 1 is yes or no."""


class CriterionConfig(Section):
    """One line of a rubric."""

    text: str = Field(min_length=1)
    """What must be true of a completion to meet it."""
    weight: float = 1.0
    """Its part; below 0 for what should not be."""
    gate: bool = False
    """Whether everything else counts only if this one is met."""


class RubricConfig(EndpointSection):
    """Pays the weight of the criteria that a language model finds met, as a share in 0..1.

    The sum of the weights met, divided by that of all weights above 0; below 0 it is 0.
    """

    kind: Literal["rubric"]
    """Tells the kind of component."""
    criteria: dict[CriterionName, CriterionConfig] = Field(min_length=1)
    """Name -> criterion. All are decided in one answer."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if REASON in self.criteria:
            msg = f'criteria names one "{REASON}", which is where the judge argues; rename it'
            raise ValueError(msg)
        if not any(criterion.weight > 0.0 for criterion in self.criteria.values()):
            msg = "criteria: none has a weight above 0, so nothing could ever be paid"
            raise ValueError(msg)
        return self


class RewardModelConfig(ComponentSection):
    """Pays what a sequence-classification model says, in a process of its own."""

    kind: Literal["reward_model"]
    """Tells the kind of component."""
    path: RecipePath
    """Directory with a Hugging Face checkpoint in safetensors; no code in it is run."""
    template: Literal["auto", "chat", "pair"] = "auto"
    """How prompt and completion become one text: by the tokenizer's chat template, as a pair of
    texts, or (``auto``) by the template where there is one."""
    label: int | None = Field(default=None, ge=0)
    """Pay the probability of this label; null for a model with a single output."""
    squash: bool = False
    """Pay a single output through the logistic function, between 0 and 1, and not as it is."""
    max_tokens: int = Field(default=4096, ge=1)
    """Of prompt and completion together; of a longer completion the start that fits is scored."""
    batch_size: int = Field(default=16, ge=1)
    """Completions computed together at most."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes. ``auto``: on a CUDA device if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of its weights. ``auto``: bfloat16 on a CUDA device and float32 elsewhere."""
    require_stop: bool = False
    """Most reward models have an opinion on cut-off completions too."""
    timeout_seconds: float = Field(default=120.0, gt=0.0, le=3600.0)
    """For one batch; after that the process is killed and its rollouts are not scored."""
    num_processes: int = Field(default=1, ge=1)
    """Copies of the model side by side."""
