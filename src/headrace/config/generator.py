"""`[generator]` and `[sampling]`: how rollouts are sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from headrace.config.section import Section
from headrace.config.server_url import ServerUrl
from headrace.types import LEAST_TEMPERATURE, OnUpdate, SamplingParams

TokenIds: TypeAlias = tuple[Annotated[int, Field(ge=0)], ...]

EngineName: TypeAlias = Literal["torch", "vllm", "sglang"]
"""What can sit inside a generator."""


def _temperature(value: float) -> float:
    """Return ``value``. Raises ValueError if it is neither 0 nor at least `LEAST_TEMPERATURE`."""
    if 0.0 < value < LEAST_TEMPERATURE:
        msg = f"{value} is neither 0, which is greedy, nor at least {LEAST_TEMPERATURE}"
        raise ValueError(msg)
    return value


class SamplingConfig(Section):
    """The distribution that tokens are drawn from.

    Nothing else applies: the ``generation_config.json`` of a model is reported and never used.
    """

    temperature: Annotated[float, AfterValidator(_temperature)] = Field(
        default=1.0, ge=0.0, le=100.0
    )
    """Divides the logits; 0 means greedy. At least 0.001 otherwise: less divides beyond fp32."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many most probable tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Keep tokens at least this share as probable as the best; 0 keeps all."""
    max_tokens: int = Field(default=256, ge=1)
    """Completion tokens at most, the stop token included."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Text that ends a completion."""
    stop_token_ids: TokenIds = ()
    """Ids that end a completion, beside the model's own end-of-sequence ids."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens that come before the one that a stop id or string ends with: the first so many
    tokens are no stop ids, and a stop string that they complete ends nothing, then or later."""
    allowed_token_ids: TokenIds | None = None
    """Sample these alone; null allows all."""
    banned_token_ids: TokenIds = ()
    """Never sample these."""
    forced_prefix: str = ""
    """Text that every completion begins with: computed with the prompt, counted in ``max_tokens``
    and ``min_tokens``, not trained on. No special tokens are added to it."""
    raw_logprobs: bool = False
    """Record log-probs under the model's own distribution too: temperature 1, no filter or mask."""
    kept_support: bool = False
    """Record the tokens that top_k, top_p and min_p left to draw from."""

    @model_validator(mode="after")
    def _leaves_a_token(self) -> Self:
        truncates = self.params(()).truncates
        if self.kept_support and not truncates:
            msg = (
                "kept_support = true without top_p, top_k and min_p: all tokens are kept, so there "
                "is nothing to record; set one of them or leave it out"
            )
            raise ValueError(msg)
        return self

    def params(
        self, eos_token_ids: tuple[int, ...], forced_prefix: tuple[int, ...] = ()
    ) -> SamplingParams:
        """Return the record the engine takes, with what depends on the model.

        ``eos_token_ids`` are its own stop ids, ``forced_prefix`` its ids of that text. Raises
        ValueError where they leave no token to sample.
        """
        stop = tuple(sorted({*self.stop_token_ids, *eos_token_ids}))
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop_token_ids=stop,
            stop_strings=self.stop_strings,
            min_tokens=self.min_tokens,
            allowed_token_ids=self.allowed_token_ids,
            banned_token_ids=self.banned_token_ids,
            forced_prefix=forced_prefix,
            raw_logprobs=self.raw_logprobs,
            kept_support=self.kept_support,
        )


class VllmConfig(Section):
    """What only ``engine = "vllm"`` reads; docs/ENGINES.md says how it is installed."""

    enforce_eager: bool | None = None
    """Run the model as it is written, without compiling it or capturing CUDA graphs; null does so
    on a processor alone, where compiling takes a C++ compiler and, at each start, its time."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of a prompt and its completion at most; null takes the model's positions."""
    block_size: Literal[16, 32, 64, 128] = 32
    """Tokens of a cache block. What rollouts share ends at a whole block."""
    prefix_caching: bool = True
    """Compute what prompts begin with alike only once."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that each layer is split over."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that the engine may take; not used on a processor, and not where
    ``generator.max_cache_gib`` says how much."""
    start_deadline_seconds: float = Field(default=600.0, gt=0.0)
    """Longest start of the engine's processes."""
    call_deadline_seconds: float = Field(default=300.0, gt=0.0)
    """Longest wait for a new token, a weight update, a pause or a resumption; after it the
    engine counts as dead and is started again."""
    max_restarts: int = Field(default=3, ge=0)
    """Starts of a dead engine in a row, without a rollout ending between them, before the run
    fails."""


class SGLangConfig(Section):
    """What only ``engine = "sglang"`` reads; docs/ENGINES.md says how its servers are launched."""

    urls: tuple[ServerUrl, ...] = ()
    """Where the servers are; all serve the model of ``model.path``. Groups go to the one with the
    fewest rollouts."""
    api_key_variable: str | None = Field(default=None, min_length=1)
    """Environment variable that holds the key the servers were launched with; the key itself
    appears in no recipe and no run directory."""
    weights_directory: Path | None = None
    """Absolute path of a directory that this process can write and every server can read under the
    same name; null takes memory of this machine, which only servers on it can read."""
    rollout_deadline_seconds: float = Field(default=1800.0, gt=0.0)
    """Longest rollout on a server, not counting pauses; after it the run fails, because drawing
    again what is long would favour what is short."""
    control_deadline_seconds: float = Field(default=60.0, gt=0.0)
    """Longest answer to a question, a pause or an abort; after it the server counts as lost."""
    update_deadline_seconds: float = Field(default=900.0, gt=0.0)
    """Longest load of published weights, after which the server counts as lost, and longest writing
    of them, after which the run fails."""
    connect_deadline_seconds: float = Field(default=10.0, gt=0.0)
    """Longest wait for a connection."""
    max_retries: int = Field(default=3, ge=0)
    """Times that a request is sent again to a server that lives, after its connection broke or it
    was too busy."""


class GeneratorConfig(Section):
    """The engine that samples."""

    engine: EngineName = "torch"
    """``torch``: headrace's own, in this process; ``vllm``: vLLM's, in processes of its own;
    ``sglang``: SGLang servers that are launched beforehand, over HTTP."""
    dtype: Literal["float32", "bfloat16", "float16", "int8", "auto"] = "float32"
    """Of the generator's weights and cache. ``auto``: bfloat16 where the device computes in it.
    ``int8``: matrices in eight bits, quantised at each update, and everything else as ``auto``."""
    max_concurrent_rollouts: int = Field(default=512, ge=1)
    """Rollouts decoded together at most; the others wait for a free slot."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed between two decode steps at most; longer prompts come in parts."""
    on_update: OnUpdate = "wait"
    """What new weights do to unfinished rollouts: ``wait`` (they end first), ``keep`` (they go on
    with their cache), ``recompute`` (they go on with a new one), ``restart`` (from the prompt)."""
    max_cache_gib: float | None = Field(default=None, gt=0.0)
    """Memory of cached keys and values at most; null takes half of what is free at the start. vLLM
    takes all of it when it starts; null is then a quarter of what is free and at most 4 on a
    processor, and what ``vllm.gpu_memory_utilization`` leaves on a GPU."""
    batch_invariant: bool = False
    """Promise every rollout the same tokens and the same bits of log-probs alone and among others,
    or refuse where that is not kept; docs/DESIGN.md says what it rests on. With ``torch`` alone."""
    staged_updates: bool = False
    """Prepare new weights beside those that sample, and exchange them between two tokens: rollouts
    then stand still for milliseconds, at the price of memory for a second copy of the weights and
    of one core while they are prepared. With ``torch`` alone."""
    vllm: VllmConfig = VllmConfig()
    """Options of vLLM."""
    sglang: SGLangConfig = SGLangConfig()
    """Options of SGLang."""
