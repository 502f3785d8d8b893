"""The worker's side of a reward model: loads a sequence classifier and scores batches of texts.

Runs in a process of its own and is the only verifier that computes with torch. The checkpoint is
data: safetensors alone, no code of its own. A checkpoint without a trained head is refused, since
transformers would make one up at random.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

from headrace.errors import ConfigError
from headrace.verifiers import frames
from headrace.verifiers.calling import MAX_REWARD


def load(target: str) -> Callable[[frames.Message], frames.Message]:
    """Return the handler of the model that ``target`` describes as JSON. Raises ConfigError."""
    scorer = _Scorer(json.loads(target))

    def handle(job: frames.Message) -> frames.Message:
        try:
            return {"status": "ok", "value": scorer.score(job["texts"])}
        except torch.OutOfMemoryError as error:
            detail = f"{scorer.where}: no memory for a batch of {len(job['texts'])}: {error}"
            return {"status": "oom", "detail": f"{detail[:500]}; lower batch_size"}
        except RuntimeError as error:
            return {"status": "error", "detail": f"{scorer.where}: {error}"[:500]}

    return handle


class _Scorer:
    """A model, its tokenizer, and how a prompt and a completion become its input."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.where = f"path = {settings['path']!r}"
        self._settings = settings
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._device = _device(settings["device"])
        self._tokenizer = self._load_tokenizer()
        self._marks = _marks_of(self._tokenizer)
        self._model = self._load_model()
        self._uses_template = self._template()
        self._check_label()
        positions = getattr(self._model.config, "max_position_embeddings", None)
        self._max_tokens = min(settings["max_tokens"], positions or settings["max_tokens"])
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad is not None else self._model.config.pad_token_id
        # By it the model finds where a padded text ends.
        self._model.config.pad_token_id = self._pad

    def score(self, texts: Sequence[tuple[str, str]]) -> list[float | None]:
        """Return one number for each prompt and completion; None where a prompt is too long.

        A completion that is too long is scored by as much of it as fits: being left out must not
        be a policy's choice.
        """
        encoded = [self._fitted(prompt, completion) for prompt, completion in texts]
        places = [place for place, ids in enumerate(encoded) if 0 < len(ids) <= self._max_tokens]
        scores: list[float | None] = [None] * len(texts)
        # Without a padding token texts cannot share a batch.
        size = max(1, len(places) if self._pad is not None else 1)
        for start in range(0, len(places), size):
            batch = places[start : start + size]
            for place, value in zip(batch, self._compute([encoded[k] for k in batch]), strict=True):
                scores[place] = value
        return scores

    def _fitted(self, prompt: str, completion: str) -> list[int]:
        """Return the tokens of a prompt and of the longest start of its completion that fits."""
        ids = self._encode(prompt, completion)
        # Shorter and shorter by the share that is too much, so that few tries are needed.
        while len(ids) > self._max_tokens and completion:
            kept = len(completion) * self._max_tokens // len(ids)
            completion = completion[: min(kept, len(completion) - 1)]
            ids = self._encode(prompt, completion)
        return ids

    def _encode(self, prompt: str, completion: str) -> list[int]:
        prompt, completion = self._harmless(prompt), self._harmless(completion)
        if not self._uses_template:
            ids: list[int] = self._tokenizer(prompt, completion)["input_ids"]
            return ids
        turns = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        # The template has written the special tokens already.
        templated: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return templated

    def _harmless(self, text: str) -> str:
        """Return ``text`` with a space in each mark that would become a special token.

        A completion that ends its turn and begins another would be scored for what it put there.
        """
        return self._marks.sub(lambda found: found[0][0] + " " + found[0][1:], text)

    @torch.inference_mode()
    def _compute(self, rows: Sequence[Sequence[int]]) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self._pad or 0, dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            mask[place, : len(row)] = 1
        logits = self._model(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
        ).logits.float()
        values: list[float] = self._paid(logits).cpu().tolist()
        if any(not math.isfinite(value) or abs(value) > MAX_REWARD for value in values):
            msg = f"an output that is no finite number within {MAX_REWARD:g}"
            raise RuntimeError(msg)
        return values

    def _paid(self, logits: torch.Tensor) -> torch.Tensor:
        label = self._settings["label"]
        if label is not None:
            return logits.softmax(dim=-1)[:, label]
        return logits[:, 0].sigmoid() if self._settings["squash"] else logits[:, 0]

    def _load_tokenizer(self) -> Any:  # noqa: ANN401 - transformers has no types
        try:
            return AutoTokenizer.from_pretrained(
                self._settings["path"], local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            msg = f"{self.where}: no tokenizer that can be read: {error}"
            raise ConfigError(msg) from error

    def _load_model(self) -> Any:  # noqa: ANN401 - transformers has no types
        try:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                self._settings["path"],
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=_dtype(self._settings["dtype"], self._device),
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            msg = f"{self.where}: no sequence classifier that can be read: {error}"
            raise ConfigError(msg) from error
        if missing := sorted(loading["missing_keys"]):
            msg = (
                f"{self.where}: the checkpoint lacks {', '.join(missing[:5])}, without which it "
                "scores at random; give one that was trained as a reward model"
            )
            raise ConfigError(msg)
        return model.to(self._device).eval()

    def _template(self) -> bool:
        has_template = bool(self._tokenizer.chat_template)
        match self._settings["template"]:
            case "pair":
                return False
            case "chat" if not has_template:
                msg = f'{self.where}: template = "chat", and its tokenizer has none; use "pair"'
                raise ConfigError(msg)
            case _:
                return has_template

    def _check_label(self) -> None:
        label, num_labels = self._settings["label"], self._model.config.num_labels
        if label is None and num_labels > 1:
            names = self._model.config.id2label
            msg = f"{self.where}: has {num_labels} labels ({names}); say which one is paid as label"
            raise ConfigError(msg)
        if label is not None and (num_labels == 1 or label >= num_labels):
            last = f"labels 0 to {num_labels - 1}" if num_labels > 1 else "a single output"
            msg = f"{self.where}: label = {label}, and it has {last}"
            raise ConfigError(msg)


def _marks_of(tokenizer: Any) -> re.Pattern[str]:  # noqa: ANN401 - transformers has no types
    """Return what finds the special tokens of a tokenizer in a text, the longest first."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    marks = {mark for mark in (*added, *tokenizer.all_special_tokens) if len(mark) > 1}
    longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
    # Without any, what matches nothing.
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        msg = 'device = "cuda": torch finds none; use "auto" or "cpu"'
        raise ConfigError(msg)
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
