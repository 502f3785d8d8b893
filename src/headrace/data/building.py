"""From one row to one `Prompt`, or to everything that keeps it from being one.

Invariant: a prompt was rendered to its real token ids and fits the model's context with its
whole completion; its id is the same on every machine. Rows are compared with each other
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.config import DataConfig
from headrace.data.columns import answer_text, conversation, id_text, prompt_content, user_text
from headrace.data.faults import RowError
from headrace.data.rows import Row
from headrace.data.sources import OpenSource
from headrace.errors import ModelError
from headrace.types import Message, Prompt

T = TypeVar("T")


class RowTasks(Protocol):
    """What loading needs of a verifier that grades by more of a row than its answer."""

    def problem(self, row: Mapping[str, object]) -> str | None:
        """Return why ``row`` cannot be graded, or None."""
        ...

    def shown(self, row: Mapping[str, object]) -> str:
        """Return as text those tests of ``row``, one without a problem, that a policy may know."""
        ...


class PromptTokenizer(Protocol):
    """What loading needs of a tokenizer."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can be called."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of ``text``, without special tokens added.

        Raises ModelError when the vocabulary does not cover it.
        """
        ...

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation, the generation prompt included.

        Raises ModelError when the chat template refuses the conversation.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a row must satisfy to become a prompt."""

    data: DataConfig
    tokenizer: PromptTokenizer
    source_name: str
    needs_answer: bool
    """A verifier compares with the answer."""
    check_answer: Callable[[str, Mapping[str, object]], str | None] | None
    """Returns what is wrong with an answer, given the columns of its row, or None."""
    tasks: RowTasks | None
    """Of a verifier that grades by the whole row; None where the answer is all."""
    max_context: int
    """Of the model, in tokens."""
    max_tokens: int
    """Of a completion."""

    @property
    def lacks_template(self) -> bool:
        """Whether a chat template is asked for that the tokenizer does not have."""
        return self.data.template == "chat" and not self.tokenizer.has_chat_template

    @property
    def shows_tests(self) -> bool:
        """Whether the user's turn has a place for tests."""
        return "{tests}" in self.data.user_template


class PromptBuilder:
    """Builds the prompts of one source."""

    def __init__(self, rules: Rules, source: OpenSource) -> None:
        self._rules = rules
        self._source = source
        self._used = {source.prompt_column, source.id_column}
        self._token_pool: dict[int, int] = {}

    def build(self, row: Row) -> tuple[Prompt | None, list[RowError]]:
        """Return the prompt and no fault, or None and every fault of its columns and length."""
        faults: list[RowError] = []
        content = _attempt(faults, lambda: prompt_content(row.values, self._source.prompt_column))
        answer = _attempt(faults, lambda: self._answer(row))
        row_id = _attempt(faults, lambda: self._row_id(row))
        tests = _attempt(faults, lambda: self._tests(row))
        if content is None:
            return None, faults
        messages = conversation(content, self._rules.data, tests=tests or "")
        token_ids = _attempt(faults, lambda: self._token_ids(content, messages))
        if token_ids is not None:
            faults.extend(self._length_faults(len(token_ids)))
        if faults or token_ids is None:
            return None, faults
        prompt = Prompt(
            prompt_id=row_id or _content_id(self._rules.source_name, content, answer),
            source=self._rules.source_name,
            text=user_text(messages),
            # Equal ids share one object: an int of its own per token would be most of the memory.
            token_ids=tuple(map(self._token_pool.setdefault, token_ids, token_ids)),
            answer=answer,
            metadata=self._metadata(row, answer),
        )
        return prompt, faults

    def _metadata(self, row: Row, answer: str | None) -> dict[str, object]:
        """Return the columns that are nothing else; an answer that is no text stays in here.

        A verifier that reads the whole row gets the whole row.
        """
        if self._rules.tasks is not None:
            return dict(row.values)
        kept = {key: row.values[key] for key in row.values if key not in self._used}
        column = self._source.answer_column
        if column in kept and (answer is not None or kept[column] is None):
            del kept[column]
        return kept

    def _tests(self, row: Row) -> str:
        """Return what ``{tests}`` stands for. Raises RowError where the row cannot be graded."""
        tasks = self._rules.tasks
        if tasks is None:
            return ""
        problem = tasks.problem(row.values)
        if problem is not None:
            reason = "its tests cannot be used"
            raise RowError(reason, problem)
        return tasks.shown(row.values) if self._rules.shows_tests else ""

    def _answer(self, row: Row) -> str | None:
        column = self._source.answer_column
        if column is None:
            return None
        try:
            answer = answer_text(row.values, column)
        except RowError:
            if self._rules.needs_answer:
                raise
            return None
        check = self._rules.check_answer
        problem = check(answer, row.values) if check else None
        if problem is not None:
            reason = f'column "{column}" holds an answer that cannot be used'
            raise RowError(reason, problem)
        return answer

    def _row_id(self, row: Row) -> str | None:
        column = self._source.id_column
        return None if column is None else id_text(row.values, column)

    def _token_ids(
        self, content: str | tuple[Message, ...], messages: tuple[Message, ...]
    ) -> tuple[int, ...]:
        rules = self._rules
        if rules.data.template == "raw" and not isinstance(content, str):
            reason = 'a list of messages needs data.template = "chat"'
            raise RowError(reason)
        # Without its template nothing can be loaded; the other faults can still be found.
        as_text = rules.data.template == "raw" or rules.lacks_template
        try:
            if as_text:
                return rules.tokenizer.encode("\n".join(message.content for message in messages))
            return rules.tokenizer.render(messages)
        except ModelError as error:
            reason = f"the {'prompt' if as_text else 'conversation'} cannot be rendered"
            raise RowError(reason, str(error)) from error

    def _length_faults(self, length: int) -> list[RowError]:
        rules = self._rules
        faults = []
        if length == 0:
            faults.append(RowError("renders to no token at all"))
        if length > rules.data.max_prompt_tokens:
            reason = f"longer than data.max_prompt_tokens = {rules.data.max_prompt_tokens}"
            faults.append(RowError(reason, f"{length} tokens"))
        if length + rules.max_tokens > rules.max_context:
            reason = (
                f"prompt and completion (max_tokens = {rules.max_tokens}) do not fit "
                f"the model's context of {rules.max_context} tokens"
            )
            faults.append(RowError(reason, f"{length} + {rules.max_tokens}"))
        return faults


def _attempt(faults: list[RowError], read: Callable[[], T]) -> T | None:
    """Return what ``read`` returns; on a fault record it and return None."""
    try:
        return read()
    except RowError as fault:
        faults.append(fault)
        return None


def _content_id(source_name: str, content: str | tuple[Message, ...], answer: str | None) -> str:
    """Hash what the row says, before any template: a changed template keeps the ids."""
    says = content if isinstance(content, str) else [[m.role, m.content] for m in content]
    text = json.dumps([source_name, says, answer])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
