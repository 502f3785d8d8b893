"""Text to token ids and back, and conversations to prompts, by a model directory's own files.

Reads ``tokenizer.json`` and the chat template directly: importing transformers' tokenizers costs
more time than everything else between a command and its first rollout. Given the same files it
yields the ids that transformers yields, with one deviation: a template that asks for today's date
gets a fixed one, so that a prompt is the same tokens on every day.

Does not train, add or resize tokens, and does not render tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import ModelError
from headrace.models.hf_files import read_object
from headrace.types import Message

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What belongs to a tokenizer in a Hugging Face model directory."""

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template may raise: it is a program, and its own mistakes are Python's errors."""
_FIXED_DATE = "26 Jul 2024"
"""The date that Llama's template falls back to."""


class Tokenizer:
    """The tokenizer of one model directory."""

    def __init__(
        self,
        directory: Path,
        backend: tokenizers.Tokenizer,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.directory = directory
        self.eos_token_ids = eos_token_ids
        """Every id that any of the model's files calls end of sequence; may be empty."""
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._template = None if chat_template is None else _compile(chat_template, directory)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer in ``directory``. Raises ModelError naming the file at fault."""
        backend = _read_backend(directory)
        settings = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        special_tokens = _special_tokens(settings)
        return cls(
            directory,
            backend,
            _read_chat_template(directory, settings),
            special_tokens,
            _eos_token_ids(directory, backend, special_tokens.get("eos_token")),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can be used."""
        return self._template is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text`` with no special token added; those spelled out count.

        Raises ModelError for a text that the vocabulary does not cover.
        """
        try:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises bare Exception and nothing narrower
            msg = f"{self.directory / 'tokenizer.json'} cannot encode the text: {error}"
            raise ModelError(msg) from error

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation up to where the policy's next turn begins.

        Raises ModelError if there is no chat template, or if it or the vocabulary refuses
        ``messages``.
        """
        if self._template is None:
            msg = f"{self.directory} has no chat template; use raw prompts (data.template = 'raw')"
            raise ModelError(msg)
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(
                messages=turns, add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except _TEMPLATE_FAILURES as error:
            msg = f"the chat template of {self.directory} refuses it: {error}"
            raise ModelError(msg) from error
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are no whole character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def save(self, directory: Path) -> None:
        """Copy the tokenizer's files, unchanged, into an existing ``directory``."""
        copy_tokenizer_files(self.directory, directory)


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy every tokenizer file of one model directory into another, unchanged."""
    if source.resolve() == target.resolve():
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / "chat_templates").is_dir():
        shutil.copytree(source / "chat_templates", target / "chat_templates", dirs_exist_ok=True)


# --- files ------------------------------------------------------------------------------------


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        msg = (
            f"{directory} has no tokenizer.json; write one with transformers: "
            "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
        )
        raise ModelError(msg)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception and nothing narrower
        msg = f"{path} cannot be read as a tokenizer: {error}"
        raise ModelError(msg) from error
    # Both may be left on in the file and would cut or lengthen prompts unseen.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``; empty if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> text; older files wrap the text in an object."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the default template, from whichever of the three places carries it."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{path} cannot be read: {error}; save it as UTF-8"
            raise ModelError(msg) from error
    legacy = _read_json(directory / "chat_template.json").get("chat_template")
    template = settings.get("chat_template", legacy)
    if isinstance(template, list):
        template = _default_template(template, directory)
    return template if isinstance(template, str) else None


def _default_template(entries: Sequence[object], directory: Path) -> object:
    try:
        return {entry["name"]: entry["template"] for entry in entries}.get("default")  # type: ignore[index]
    except (TypeError, KeyError) as error:
        msg = (
            f"chat_template of {directory} must be text or a list of "
            '{"name": "default", "template": text}'
        )
        raise ModelError(msg) from error


def _eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """Return the union: chat models often name the end of a turn in only one of the files."""
    ids = [] if eos_token is None else [backend.token_to_id(eos_token)]
    for name in ("generation_config.json", "config.json"):
        ids.extend(_as_ids(_read_json(directory / name).get("eos_token_id")))
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _as_ids(value: object) -> Iterable[int]:
    if isinstance(value, list):
        return [token_id for token_id in value if isinstance(token_id, int)]
    return [value] if isinstance(value, int) else []


# --- chat templates ---------------------------------------------------------------------------


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's part for other tools; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration, never written to

    def parse(self, parser: Parser) -> list[Node]:
        """Return the nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, directory: Path) -> jinja2.Template:
    """Compile under the settings that Hugging Face templates are written for, in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _fixed_date
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        msg = f"the chat template of {directory} is broken in line {error.lineno}: {error.message}"
        raise ModelError(msg) from error


def _to_json(value: object, **options: Any) -> str:  # noqa: ANN401 - passed to json.dumps as they are
    """Without jinja's HTML escapes, which a model has never seen."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(reason: str) -> None:
    raise jinja2.TemplateRuntimeError(reason)


def _fixed_date(_format: str) -> str:
    return _FIXED_DATE
