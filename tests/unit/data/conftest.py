from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.config import DataConfig, JsonlSource
from headrace.data import LoadReport, load_prompts
from headrace.errors import ModelError
from headrace.types import Message, Prompt

Load = Callable[..., LoadReport]


@dataclass
class CharacterTokenizer:
    """One id per character; the template wraps each turn in ids of its own."""

    has_chat_template: bool = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        assert self.has_chat_template
        if [message.role for message in messages].count("system") > 1:
            refusal = "only one system message is supported"
            raise ModelError(refusal)
        turns = "".join(f"<{message.role}>{message.content}</>" for message in messages)
        return self.encode(turns + "<assistant>")


@pytest.fixture
def tokenizer() -> CharacterTokenizer:
    return CharacterTokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[Sequence[dict[str, Any] | str]], Path]:
    """Write rows, or lines exactly as given, to a file."""

    def write(rows: Sequence[dict[str, Any] | str]) -> Path:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_bytes("".join(line + "\n" for line in lines).encode())
        return path

    return write


@pytest.fixture
def load(
    write_jsonl: Callable[[Sequence[dict[str, Any] | str]], Path], tokenizer: CharacterTokenizer
) -> Load:
    """Load JSONL rows; keywords go to the source, the data section or `load_prompts`."""

    def run(rows: Sequence[dict[str, Any] | str], **options: Any) -> LoadReport:  # noqa: ANN401 - as above
        source_keys = JsonlSource.model_fields.keys() & options
        data_keys = DataConfig.model_fields.keys() & options
        source = JsonlSource(
            type="jsonl", path=write_jsonl(rows), **{key: options.pop(key) for key in source_keys}
        )
        data = DataConfig(train=source, **{key: options.pop(key) for key in data_keys})
        settings = {
            "tokenizer": tokenizer,
            "source_name": "train",
            "needs_answer": True,
            "check_answer": None,
            "max_context": 2048,
            "max_tokens": 64,
        } | options
        return load_prompts(data, source, **settings)

    return run


@pytest.fixture(scope="session")
def make_prompts() -> Callable[[int], list[Prompt]]:
    """Make prompts p0, p1, ... without a file."""

    @functools.cache
    def make(size: int) -> list[Prompt]:
        return [
            Prompt(prompt_id=f"p{index}", source="train", text="?", token_ids=(1,))
            for index in range(size)
        ]

    return make
