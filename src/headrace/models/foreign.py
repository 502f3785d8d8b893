"""A model that transformers computes, behind what learner and generator need of a policy.

Owns: what it computes is what the model's own forward pass computes, in evaluation mode. Two things
are asked of it: the rows that its output layer is given, for chosen tokens, and the logits that it
makes of such rows, with all that it does to them afterwards (a bias, a scale, soft-capping). Both
go through the model's own ``forward``; only the input of its output layer is read or replaced on
the way. `load_foreign` tries on the model at hand that this holds, and refuses it where it does
not.

Attention is transformers' eager one: the fused kinds leave out what they do not know of, such as
soft-capped scores. Rows are padded on the right, where a causal model never looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import ModelError
from headrace.models.checkpoint import load_decoder
from headrace.models.decoder import Decoder
from headrace.models.foreign_config import ForeignConfig, hf_config_of, is_foreign
from headrace.models.hf_files import read_hf_config
from headrace.models.tokenizer import copy_tokenizer_files

TOLERANCE = 1e-4
"""Of the largest logit: two orders of the same sums in fp32 differ by less, two models by more."""

LOUD = 100.0
"""Standard deviation of the logits by which a cap or a scale behind the output layer shows."""


MAX_NAMED = 3
"""Tensors that one message lists."""


class ForeignDecoder(nn.Module):
    """A causal language model over padded rows."""

    def __init__(self, model: nn.Module, config: ForeignConfig) -> None:
        """``model`` is one of transformers' with an output layer. It is put in evaluation mode."""
        super().__init__()
        self.config = config
        self.model = model.eval()
        self._given: Tensor | None = None
        """What the output layer is to read instead of what the model gives it."""
        self._seen: list[Tensor] = []
        head = _head(model, config)
        head.register_forward_pre_hook(self._before_head)
        self.has_plain_head = False
        """Whether logits are hidden states times `output_weight`, and nothing else."""

    def train(self, mode: bool = True) -> ForeignDecoder:
        """Stay in evaluation mode: with dropout, log-probs would not be those sampled from."""
        del mode
        return self

    @property
    def output_weight(self) -> Tensor:
        """[vocab, hidden] of the output layer."""
        weight: Tensor = _head(self.model, self.config).weight
        return weight

    def hidden(self, input_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return what the output layer reads, [m, hidden], for m tokens of ``input_ids`` [B, L].

        Token i is at row ``rows[i]`` and column ``columns[i]``. What is to the right of a row's own
        tokens may be any token.
        """
        self._seen.clear()
        self.model(input_ids=input_ids, use_cache=False)
        assert len(self._seen) == 1, "the output layer reads once"
        return self._seen.pop()[rows, columns]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [m, vocab] for ``hidden`` [m, hidden], as the model's own forward ends with."""
        dummy = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        with self._giving(hidden.unsqueeze(0)):
            output = self.model(input_ids=dummy, use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    @contextmanager
    def _giving(self, hidden: Tensor) -> Iterator[None]:
        self._given = hidden
        try:
            yield
        finally:
            self._given = None

    def _before_head(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._given is not None:
            return (self._given, *inputs[1:])
        hidden, *rest = inputs
        self._seen.append(hidden)
        # Of no token: the logits of all of them would be the largest tensor by far.
        return (hidden[:, :0], *rest)


Policy: TypeAlias = Decoder | ForeignDecoder
"""What a learner trains."""


def load_policy(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Policy:
    """Return the model of a directory, by who computes it; see `load_decoder`, `load_foreign`."""
    if is_foreign(read_hf_config(directory)):
        return load_foreign(directory, dtype, device)
    return load_decoder(directory, dtype, device)


def save_foreign(decoder: ForeignDecoder, directory: Path, source_directory: Path) -> None:
    """Write a complete model directory; tokenizer and generation config are the source's.

    In the dtype that the weights have. Raises OSError or SafetensorError.
    """
    model: Any = decoder.model
    model.save_pretrained(directory)
    copy_tokenizer_files(source_directory, directory)
    generation_config = source_directory / "generation_config.json"
    if generation_config.is_file():
        shutil.copyfile(generation_config, directory / generation_config.name)


def load_foreign(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ForeignDecoder:
    """Return the model of a directory, every weight and buffer from its files.

    Raises ModelError where a tensor is missing, unexpected or of another shape, and for a model
    that a pass over padded rows does not compute; see `try_out`.
    """
    config = ForeignConfig.read(directory)
    decoder = ForeignDecoder(_read(directory).to(device), config)
    try_out(decoder)
    for parameter in decoder.parameters():
        # Buffers stay as they are: the frequencies of rotary embeddings need their digits.
        parameter.data = parameter.data.to(dtype)
    return decoder


def _read(directory: Path) -> nn.Module:
    # As in `hf_config_of`.
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        config=hf_config_of(directory),
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    model, report = loaded
    wrong = [f"{kind.replace('_', ' ')}: {_some(found)}" for kind, found in report.items() if found]
    if wrong:
        msg = f"{directory}: the weights do not fit config.json: {'; '.join(wrong)}"
        raise ModelError(msg)
    # The recipe says how is sampled; what the file says would be checked whenever it is saved.
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    found: nn.Module = model
    return found


def _some(found: Any) -> str:  # noqa: ANN401 - a set or a list, of names or tuples
    items = sorted(map(str, found)) if not isinstance(found, str) else [found]
    more = len(items) - MAX_NAMED
    return ", ".join(items[:MAX_NAMED]) + f" and {more} more" * (more > 0)


@torch.no_grad()
def try_out(decoder: ForeignDecoder) -> None:
    """Find out whether the output layer is plain; raise ModelError if the two halves do not hold.

    That is, where hidden states and logits of padded rows are not what the model computes of each
    row on its own. Changes nothing else.
    """
    device, size = decoder.output_weight.device, decoder.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    length = min(8, decoder.config.max_positions)
    ids = torch.randint(size, (2, length), generator=generator).to(device)
    short = max(1, length - 3)
    rows = torch.tensor([0] * length + [1] * short, device=device)
    columns = torch.tensor([*range(length), *range(short)], device=device)
    found = decoder.logits(decoder.hidden(ids, rows, columns))
    expected = torch.cat((_own(decoder, ids[0]), _own(decoder, ids[1, :short])))
    gap = float((found - expected).abs().max())
    if not gap <= TOLERANCE * float(expected.abs().max()):
        msg = (
            f"{decoder.config.directory}: {decoder.config.family} computes other logits for a row "
            f"that is padded on the right than for the row alone (by {gap:.2g}), so it is not "
            "causal or mixes rows; it cannot be trained here"
        )
        raise ModelError(msg)
    decoder.has_plain_head = _is_plain(decoder, generator)


def _own(decoder: ForeignDecoder, ids: Tensor) -> Tensor:
    """Return the logits [L, vocab] that the model computes of one row when left alone."""
    hooks = _head(decoder.model, decoder.config)._forward_pre_hooks  # noqa: SLF001 - nn.Module's
    kept = dict(hooks)
    hooks.clear()
    try:
        logits: Tensor = decoder.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        hooks.update(kept)
    return logits


def _is_plain(decoder: ForeignDecoder, generator: torch.Generator) -> bool:
    """Whether large logits too are exactly the product with the output weight."""
    weight = decoder.output_weight
    if _head(decoder.model, decoder.config).bias is not None:
        return False
    hidden = torch.randn(1, 5, weight.shape[1], generator=generator).to(weight)
    hidden *= LOUD / functional.linear(hidden, weight).std().clamp(min=1e-6)
    product = functional.linear(hidden, weight)[0]
    return torch.equal(decoder.logits(hidden[0]), product)


def _head(model: nn.Module, config: ForeignConfig) -> nn.Linear:
    any_model: Any = model
    head = any_model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.out_features != config.vocab_size:
        msg = (
            f"{config.directory}: {config.family} has no output layer that is a matrix of "
            f"{config.vocab_size} tokens; it cannot be trained here"
        )
        raise ModelError(msg)
    return head
