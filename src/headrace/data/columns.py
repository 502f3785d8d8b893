"""From a row's columns to text: the prompt as a conversation, the answer and the id.

Invariant: a value that is absent, blank or of the wrong type is a `RowError` that names the
column; nothing is guessed or filled in. Token ids are made elsewhere.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from decimal import Decimal

from headrace.config import DataConfig
from headrace.data.faults import RowError
from headrace.types import Message

_PLACEHOLDER = re.compile(r"\{prompt\}|\{tests\}")
_ROLES = ("system", "user", "assistant")


def prompt_content(values: Mapping[str, object], column: str) -> str | tuple[Message, ...]:
    """Return the prompt as the row has it: text, or a conversation that a user turn ends."""
    value = _present(values, column)
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _conversation(value, column)
    reason = f'column "{column}" must hold text or a list of messages'
    raise RowError(reason, f"found {type(value).__name__}")


def conversation(
    content: str | tuple[Message, ...], data: DataConfig, *, tests: str = ""
) -> tuple[Message, ...]:
    """Return the messages to render: the user template and the system prompt applied.

    ``tests`` is what ``{tests}`` stands for in the template.
    """
    if isinstance(content, str):
        # Not str.format: prompts and templates hold braces of their own. In one pass: a prompt may
        # spell a placeholder itself.
        says = {"{prompt}": content, "{tests}": tests}
        text = _PLACEHOLDER.sub(lambda found: says[found.group()], data.user_template)
        content = (Message(role="user", content=text),)
    if data.system_prompt is None or any(message.role == "system" for message in content):
        return content
    return (Message(role="system", content=data.system_prompt), *content)


def user_text(messages: tuple[Message, ...]) -> str:
    """Return what the user says, its turns apart by a blank line."""
    return "\n\n".join(message.content for message in messages if message.role == "user")


def answer_text(values: Mapping[str, object], column: str) -> str:
    """Return the expected answer; numbers are written out as Python writes them."""
    value = _present(values, column)
    if isinstance(value, str):
        return value
    reason = f'column "{column}" must hold text or a finite number'
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowError(reason, f"found {type(value).__name__}")
    if not math.isfinite(value):
        raise RowError(reason, f"found {value}")
    return str(value)


def id_text(values: Mapping[str, object], column: str) -> str:
    """Return the row's own id; whole numbers are written out."""
    value = _present(values, column)
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    reason = f'column "{column}" must hold text or a whole number to be an id'
    raise RowError(reason, f"found {type(value).__name__}")


def _present(values: Mapping[str, object], column: str) -> object:
    if column not in values:
        close = difflib.get_close_matches(column, values, n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        reason = f'no column "{column}"; the columns are {", ".join(values) or "none"}{hint}'
        raise RowError(reason)
    value = values[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        reason = f'column "{column}" is empty'
        raise RowError(reason)
    return value


def _conversation(value: list[object], column: str) -> tuple[Message, ...]:
    if not value:
        reason = f'column "{column}" holds no message'
        raise RowError(reason)
    messages = tuple(_message(item, position) for position, item in enumerate(value, start=1))
    if messages[-1].role != "user":
        reason = f'the last message of column "{column}" must be the user\'s'
        raise RowError(reason, f"found {messages[-1].role}")
    if not messages[-1].content.strip():
        reason = f'the last message of column "{column}" is empty'
        raise RowError(reason)
    return messages


def _message(item: object, position: int) -> Message:
    """Read one message. Tables fill keys that only other rows use with null: those are no keys."""
    given = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    role, content = given.get("role"), given.get("content")
    if given.keys() != {"role", "content"} or not isinstance(content, str):
        reason = 'a message must be {"role": text, "content": text} and nothing else'
        raise RowError(reason, f"message {position}")
    if role not in _ROLES:
        reason = f"the role of a message must be one of {', '.join(_ROLES)}"
        raise RowError(reason, f"message {position} has {role!r}")
    return Message(role=role, content=content)
