"""Everything that can be known to be wrong before any work, found in one pass.

Each check adds its own lines and lets the others go on, so the user sees all faults at once. What
rests on a key that is itself at fault is not checked: it would report faults that are none. The
result holds what the run then uses: nothing is read twice.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import (
    CheckedRecipe,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
)
from headrace.config.sglang_rules import is_api_key
from headrace.data import LoadReport, RowTasks, load_prompts
from headrace.errors import ConfigError, DataError, ModelError, UserError, problems_of
from headrace.generators.torch_engine.kv_cache import block_bytes
from headrace.generators.torch_engine.runner_choice import refusals
from headrace.generators.torch_generator import BLOCK_SIZE, free_memory
from headrace.learners.adapter import adapter_shape
from headrace.models.adapter_files import check_adapter
from headrace.models.catalogue import BUNDLED, FETCHABLE, resolve_model
from headrace.models.decoder_config import DecoderConfig
from headrace.models.foreign_config import ForeignConfig, read_policy_config
from headrace.models.hf_files import check_weights, ignored_sampling_options, read_hf_config
from headrace.models.tokenizer import Tokenizer
from headrace.runtime.cores import core_notes
from headrace.runtime.devices import engine_device, missing_device, resolve_device
from headrace.runtime.engines import missing_engine
from headrace.runtime.foreign_models import foreign_bytes, foreign_note, foreign_problems
from headrace.runtime.precision import resolve_dtype
from headrace.runtime.rank_problems import rank_problems
from headrace.runtime.remote_verifiers import remote_findings
from headrace.runtime.verifier_checks import (
    check_component,
    component_notes,
    isolation_note,
)
from headrace.types import Message, SamplingParams
from headrace.verifiers import AnswerCheck, answer_checker, needs_answer, row_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What is known of the policy without its weights."""

    directory: Path
    hf_config: dict[str, Any]
    decoder_config: DecoderConfig | ForeignConfig
    tokenizer: Tokenizer

    @classmethod
    def read(cls, directory: Path) -> PreparedModel:
        """Read what ``directory`` says of its model. Raises ModelError."""
        hf_config = read_hf_config(directory)
        return cls(
            directory=directory,
            hf_config=hf_config,
            decoder_config=read_policy_config(directory, hf_config),
            tokenizer=Tokenizer.load(directory),
        )


@dataclass(slots=True, kw_only=True)
class Preflight:
    """What was found. ``model`` and ``train`` are there whenever ``problems`` is empty."""

    recipe: CheckedRecipe
    problems: list[str] = field(default_factory=list)
    """One line for each thing to fix, those of the recipe first."""
    notes: list[str] = field(default_factory=list)
    """Worth knowing, and no reason to stop."""
    model: PreparedModel | None = None
    train: LoadReport | None = None
    eval: LoadReport | None = None
    canaries: LoadReport | None = None

    def require(self) -> PreparedRun:
        """Return the prepared parts. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(*self.problems)
        assert self.model is not None
        assert self.train is not None
        config = _recorded(self.recipe.config, self.model)
        return PreparedRun(
            config=config,
            model=self.model,
            train=self.train,
            eval=self.eval,
            canaries=self.canaries,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run in which nothing is known to be wrong."""

    config: RunConfig
    model: PreparedModel
    train: LoadReport
    eval: LoadReport | None
    canaries: LoadReport | None = None


def preflight(recipe: CheckedRecipe, *, ranks_are_here: bool = True) -> Preflight:
    """Check model, data, verifier and memory of ``recipe``; raises nothing of the user's making.

    ``ranks_are_here``: whether the learner's ranks need devices of this machine.
    """
    config = recipe.config
    found = Preflight(recipe=recipe, problems=list(recipe.problems))
    if recipe.knows("model"):
        with _collect(found):
            found.model = prepare_model(recipe)
            found.notes += _model_notes(found.model)
            if not recipe.faulty and not missing_device(config.device):
                found.notes += _memory_notes(config, found.model.decoder_config)
            found.problems += _sampling_problems(recipe, found.model)
            found.problems += _length_problems(recipe, found.model)
            found.problems += foreign_problems(recipe, found.model.decoder_config)
            if not missing_device(config.device):
                found.problems += rank_problems(
                    recipe, found.model.decoder_config, are_here=ranks_are_here
                )
            if isinstance(found.model.decoder_config, DecoderConfig):
                check_weights(found.model.directory, found.model.decoder_config)
                _check_adapter(recipe, found.model.decoder_config)
    found.problems += _device_problems(recipe)
    found.problems += _engine_problems(recipe)
    if not recipe.faulty:
        found.notes += core_notes(config, os.cpu_count() or 1)
    for name, component in config.verifier.components.items():
        with _collect(found):
            check_component(name, component)
            found.notes += component_notes(name, component)
    if recipe.knows("verifier"):
        with _collect(found):
            note = isolation_note(config.verifier)
            found.notes += () if note is None else (note,)
    if config.verifier.remote is not None and recipe.knows("verifier"):
        problems, notes = remote_findings(config.verifier.remote, os.environ)
        found.problems += problems
        found.notes += notes
    if recipe.knows("data"):
        _load_data(found)
    found.problems += _torch_engine_problems(found)
    found.problems += _cache_problems(found)
    return found


@contextmanager
def _collect(found: Preflight) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        found.problems += problems_of(error)


def prepare_model(recipe: CheckedRecipe) -> PreparedModel:
    """Find the model and read all but its weights. Raises ConfigError and ModelError."""
    named = recipe.config.model.path
    beside = _beside(recipe.folder, named)
    try:
        directory = resolve_model(named if beside is None or not beside.is_dir() else str(beside))
    except ModelError as error:
        elsewhere = "" if beside is None else f"; nor is there {beside}"
        msg = f'model.path = "{named}": {error}{elsewhere}'
        raise ConfigError(msg) from error
    return PreparedModel.read(directory)


def _check_adapter(recipe: CheckedRecipe, decoder: DecoderConfig) -> None:
    """Check the adapter that training starts from. Raises ConfigError."""
    lora = recipe.config.learner.lora
    if lora is None or lora.start is None or not recipe.knows("learner", "lora"):
        return
    try:
        check_adapter(lora.start, adapter_shape(lora), decoder.tensor_shapes())
    except ModelError as error:
        msg = f'learner.lora.start = "{lora.start}": {error}'
        raise ConfigError(msg) from error


def _beside(folder: Path | None, named: str) -> Path | None:
    """Return the directory of the recipe's ``folder`` that may be meant; None for a known name."""
    is_name = named in BUNDLED or named in FETCHABLE
    return None if is_name or folder is None else folder / Path(named).expanduser()


def _recorded(config: RunConfig, model: PreparedModel) -> RunConfig:
    """Return ``config`` with a model that means the same from every directory."""
    if config.model.path in BUNDLED or config.model.path in FETCHABLE:
        return config
    return config.model_copy(update={"model": ModelConfig(path=str(model.directory))})


def _device_problems(recipe: CheckedRecipe) -> Iterator[str]:
    device = recipe.config.device
    missing = missing_device(device) if recipe.knows("device") else None
    if missing:
        yield f'device = "{device}": {missing}'


def _engine_problems(recipe: CheckedRecipe) -> Iterator[str]:
    engine = recipe.config.generator.engine
    missing = missing_engine(engine) if recipe.knows("generator", "engine") else None
    if missing:
        yield f'generator.engine = "{engine}": {missing}'
    variable = recipe.config.generator.sglang.api_key_variable
    if variable is not None and not os.environ.get(variable):
        yield (
            f'generator.sglang.api_key_variable = "{variable}": the environment does not hold it; '
            "export the key under that name"
        )
    elif variable is not None and not is_api_key(os.environ[variable]):
        # Never quoted: the recipe's faults are printed and sent on.
        yield (
            f'generator.sglang.api_key_variable = "{variable}": the key in it holds a space, a '
            "line break or another character that no HTTP header takes; export it without"
        )


def _sampling_problems(recipe: CheckedRecipe, model: PreparedModel) -> Iterator[str]:
    """Name the token ids that the model does not have, and what leaves it no token to sample."""
    config, size = recipe.config, model.decoder_config.vocab_size
    sections = {"sampling": config.sampling, "eval.sampling": config.eval.sampling}
    for name, sampling in sections.items():
        if sampling is None:
            continue
        path = name.split(".")
        for key in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            beyond = [token for token in getattr(sampling, key) or () if token >= size]
            if beyond and recipe.knows(*path, key):
                yield f"{name}.{key} = {beyond}: the model's ids end at {size - 1}"
        if recipe.knows(*path):
            try:
                sampling_params(sampling, model.tokenizer)
            except (ValueError, ModelError) as error:
                yield f"{name}: {error}"


def _length_problems(recipe: CheckedRecipe, model: PreparedModel) -> Iterator[str]:
    limit, positions = (
        recipe.config.generator.vllm.max_model_len,
        model.decoder_config.max_positions,
    )
    if limit is not None and limit > positions and recipe.knows("generator", "vllm"):
        yield (
            f"generator.vllm.max_model_len = {limit}: the model has {positions} positions; lower "
            "it, or leave it out for all of them"
        )


def sampling_params(sampling: SamplingConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Return what the engine takes. Raises ValueError or ModelError where the model forbids it."""
    prefix = tokenizer.encode(sampling.forced_prefix) if sampling.forced_prefix else ()
    return sampling.params(tokenizer.eos_token_ids, prefix)


def _model_notes(model: PreparedModel) -> Iterator[str]:
    options = ignored_sampling_options(model.directory)
    if options:
        listed = ", ".join(f"{name} = {value}" for name, value in options.items())
        yield (
            f"generation_config.json of the model sets {listed}: not applied. Sampling is what "
            "[sampling] and [eval.sampling] say"
        )
    if isinstance(model.decoder_config, ForeignConfig):
        yield foreign_note(model.decoder_config)
    if not model.tokenizer.eos_token_ids:
        yield "the model names no end-of-sequence token: rollouts end at sampling.max_tokens only"


def _memory_notes(config: RunConfig, decoder: DecoderConfig | ForeignConfig) -> Iterator[str]:
    """Compare an estimate with the device's memory: weights, gradients, moments, copies, cache."""
    available = free_memory(resolve_device(config.device))
    if isinstance(decoder, ForeignConfig):
        needed = foreign_bytes(config, decoder)
    else:
        needed = _needed_bytes(config, decoder)
    if available is not None and needed > available:
        yield (
            f"about {needed / 2**30:.1f} GiB are needed and {available / 2**30:.1f} GiB are free: "
            "lower generator.max_concurrent_rollouts, learner.max_tokens_per_microbatch or "
            "sampling.max_tokens, or use a smaller model"
        )


def _needed_bytes(config: RunConfig, decoder: DecoderConfig) -> int:
    heads = decoder.num_heads + decoder.num_kv_heads
    attention = decoder.hidden_size * decoder.head_dim * 2 * heads
    per_layer = attention + 3 * decoder.hidden_size * decoder.intermediate_size
    embeddings = decoder.vocab_size * decoder.hidden_size * (2 - decoder.tie_word_embeddings)
    parameters = decoder.num_layers * per_layer + embeddings
    trained, frozen = parameters, 0
    if (lora := config.learner.lora) is not None:
        factors = adapter_shape(lora).factor_shapes(decoder.tensor_shapes())
        trained, frozen = sum(map(math.prod, factors.values())), parameters
    # Master, gradient and two moments in fp32, and the reference if any; the generator's copy.
    copies = 4 + (config.objective.kl_coefficient > 0)
    if config.learner.parallel.has_processes:
        # Each replica is one; a checkpoint copies weights and moments, to write them meanwhile.
        copies = copies * config.learner.parallel.replicas + 3
    # What is published beside a step is a copy of its own.
    published = parameters if config.copies_weights else 0
    weights = copies * trained + frozen + parameters + published
    return 4 * (weights + _cached_values(config, decoder) + _kept_values(config, decoder))


def _cached_values(config: RunConfig, decoder: DecoderConfig) -> int:
    """Keys and values of the rollouts that run together, in training or in an evaluation."""
    running = config.generator.max_concurrent_rollouts
    if config.data.eval is None:
        running = min(running, config.groups_per_step * config.group_size)
    new_tokens = max(config.sampling.max_tokens, config.eval_sampling.max_tokens)
    length = config.data.max_prompt_tokens + new_tokens
    values = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * length * running
    limit = config.generator.max_cache_gib
    return values if limit is None else min(values, int(limit * 2**30) // 4)


def _kept_values(config: RunConfig, decoder: DecoderConfig) -> int:
    """What a micro-batch keeps for its backward pass, roughly: inputs and outputs of each layer."""
    prompts = config.groups_per_step * config.data.max_prompt_tokens
    completions = config.groups_per_step * config.group_size * config.sampling.max_tokens
    tokens = min(config.learner.max_tokens_per_microbatch, prompts + completions)
    heads = decoder.num_heads + decoder.num_kv_heads
    per_layer = (
        6 * decoder.hidden_size + 4 * decoder.intermediate_size + 3 * heads * decoder.head_dim
    )
    if config.learner.activation_checkpointing:
        return tokens * (decoder.num_layers * decoder.hidden_size + per_layer)
    return tokens * decoder.num_layers * per_layer


def _load_data(found: Preflight) -> None:
    """Load canaries, then training prompts without them, then held-out ones without either.

    Without a model, or without knowing how many tokens follow, the rows are read all the same:
    only whether they fit the context stays unknown.
    """
    config, knows = found.recipe.config, found.recipe.knows
    checks_answers = knows("verifier") and needs_answer(config.verifier)
    model = found.model if knows("sampling") and knows("eval") else None
    tasks = row_tasks(config.verifier) if knows("verifier") else None
    with _collect(found), answer_checker(config.verifier) as check_answer:
        load = _Loader(config, model, check_answer if checks_answers else None, tasks)
        used: frozenset[str] = frozenset()
        if config.data.canaries is not None:
            with _collect(found):
                found.canaries = load("canaries", config.data.canaries, used)
                used |= {prompt.text for prompt in found.canaries.prompts}
        with _collect(found):
            found.train = load("train", config.data.train, used)
            used |= {prompt.text for prompt in found.train.prompts}
        if config.data.eval is not None:
            with _collect(found):
                found.eval = load("eval", config.data.eval, used)
    found.notes += _data_notes(found)
    found.notes += () if tasks is None else tasks.notes()


class _UnknownTokenizer:
    """Stands in where there is no model: every text is one token and nothing is refused."""

    has_chat_template = True

    def encode(self, text: str) -> tuple[int, ...]:
        del text
        return (0,)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        del messages
        return (0,)


@dataclass(frozen=True)
class _Loader:
    config: RunConfig
    model: PreparedModel | None
    check_answer: AnswerCheck | None
    tasks: RowTasks | None

    def __call__(self, name: str, source: SourceConfig, exclude: frozenset[str]) -> LoadReport:
        sampling = self.config.eval_sampling if name == "eval" else self.config.sampling
        model = self.model
        try:
            return load_prompts(
                self.config.data,
                source,
                _UnknownTokenizer() if model is None else model.tokenizer,
                source_name=name,
                needs_answer=self.check_answer is not None,
                check_answer=self.check_answer,
                tasks=self.tasks,
                max_context=sys.maxsize if model is None else _context(self.config, model),
                max_tokens=sampling.max_tokens,
                exclude=exclude,
            )
        except DataError as error:
            raise DataError(*(f"data.{name}: {problem}" for problem in error.problems)) from error


def _context(config: RunConfig, model: PreparedModel) -> int:
    """Return the tokens of prompt and completion that model and engine take at most."""
    positions = model.decoder_config.max_positions
    limit = config.generator.vllm.max_model_len
    return positions if limit is None else min(limit, positions)


def _torch_engine_problems(found: Preflight) -> Iterator[str]:
    """Say what the torch engine cannot do on this device, or with such a model."""
    recipe, config = found.recipe, found.recipe.config.generator
    if found.model is None or config.engine != "torch" or not recipe.knows("generator"):
        return
    if missing_device(recipe.config.device):
        return
    device = engine_device(recipe.config)
    yield from refusals(
        found.model.decoder_config,
        BLOCK_SIZE,
        resolve_dtype(config.dtype, device),
        device,
        is_quantized=config.dtype == "int8",
        batch_invariant=config.batch_invariant,
    )


def _cache_problems(found: Preflight) -> Iterator[str]:
    """Say where the torch engine's cache is too small for the longest rollout alone.

    vLLM judges its own cache when it starts; SGLang's is not set here.
    """
    recipe, config = found.recipe, found.recipe.config.generator
    limit = config.max_cache_gib
    if limit is None or found.model is None or config.engine != "torch":
        return
    settled = (("generator", "engine"), ("generator", "dtype"), ("sampling",), ("eval",))
    if not all(recipe.knows(*path) for path in settled) or missing_device(recipe.config.device):
        return
    device = engine_device(recipe.config)
    block = block_bytes(found.model.decoder_config, BLOCK_SIZE, resolve_dtype(config.dtype, device))
    held = int(limit * 2**30) // block * BLOCK_SIZE
    training, evaluation = recipe.config.sampling, recipe.config.eval_sampling
    sections = (training, training, evaluation)
    own = "sampling" if recipe.config.eval.sampling is None else "eval.sampling"
    names = ("sampling", "sampling", own)
    for (source, report), section, name in zip(_sources(found), sections, names, strict=True):
        if report is None:
            continue
        prompt = max((len(prompt.token_ids) for prompt in report.prompts), default=0)
        tokens = prompt + section.max_tokens
        if tokens > held:
            least = math.ceil(-(-tokens // BLOCK_SIZE) * block / 2**30 * 1e6) / 1e6
            yield (
                f"generator.max_cache_gib = {limit:g}: the cache holds {held} tokens, and the "
                f"longest prompt of data.{source} with its completion has {prompt} + "
                f"{name}.max_tokens = {section.max_tokens}, which is {tokens}; set it to at least "
                f"{least:g}, or lower max_tokens"
            )


def _sources(found: Preflight) -> tuple[tuple[str, LoadReport | None], ...]:
    return ("canaries", found.canaries), ("train", found.train), ("eval", found.eval)


def _data_notes(found: Preflight) -> Iterator[str]:
    for name, report in _sources(found):
        if report is None:
            continue
        counts = {
            "skipped for a fault": report.num_skipped,
            "left out, standing in a source read before": report.num_excluded,
            "left out as repeated": report.num_repeated,
        }
        for kind, number in counts.items():
            if number:
                yield f"data.{name}: {number} of {report.num_rows} rows {kind}"
