"""Which part of a completion is run."""

from __future__ import annotations

import pytest

from headrace.verifiers.code.program import defines, find_program

ONE = "Here:\n```python\nprint(1)\n```\ndone"
TWO = ONE + "\n```python\nprint(2)\n```"


def source(completion: str, rule: str = "last_block", **options: object) -> str | None:
    settings = {"language": "python", "unclosed_is_code": False} | options
    found = find_program(completion, rule, **settings).source
    return None if found is None else found.strip()


@pytest.mark.parametrize(
    ("completion", "rule", "expected"),
    [
        (ONE, "last_block", "print(1)"),
        (TWO, "last_block", "print(2)"),
        (TWO, "first_block", "print(1)"),
        (TWO, "only_block", None),
        (ONE, "only_block", "print(1)"),
        ("print(3)", "whole", "print(3)"),
        ("print(3)", "last_block", None),
        ("", "last_block", None),
        ("", "whole", None),
        ("```python\n\n```", "last_block", None),
        ("```\nprint(4)\n```", "last_block", "print(4)"),
        ("```py\nprint(4)\n```", "last_block", "print(4)"),
        ("```Python3\nprint(4)\n```", "last_block", "print(4)"),
        ("```{.python}\nprint(4)\n```", "last_block", "print(4)"),
        ("~~~python\nprint(4)\n~~~", "last_block", "print(4)"),
        ("```cpp\nint x;\n```", "last_block", None),
        (ONE + "\n```text\n1\n```", "last_block", "print(1)"),
        (ONE + "\n```\n1\n```", "last_block", "print(1)"),
        ("```python\nprint(5)", "last_block", None),
        (ONE + "\n```python\nprint(5)", "last_block", None),
        ("````python\ns = '''\n```\n'''\n````", "last_block", "s = '''\n```\n'''"),
        ("```python\r\nprint(6)\r\n```\r\n", "last_block", "print(6)"),
        ("<think>```python\nprint(7)\n```</think>no", "last_block", None),
        ("<think>```python\nprint(7)\n```</think>" + ONE, "only_block", "print(1)"),
        ("<think>" + ONE, "last_block", None),
        ("use ```print(8)``` here", "last_block", None),
    ],
)
def test_the_declared_rule_finds_the_program(
    completion: str, rule: str, expected: str | None
) -> None:
    assert source(completion, rule) == expected


def test_an_unclosed_fence_reaches_to_the_end_where_that_is_declared() -> None:
    assert source("```python\nprint(5)", unclosed_is_code=True) == "print(5)"
    assert source(ONE + "\n```python\nprint(5)", unclosed_is_code=True) == "print(5)"


def test_another_language_has_its_own_tags() -> None:
    assert source("```c++\nint x;\n```", language="cpp") == "int x;"
    assert source("```js\nx\n```", language="javascript") == "x"
    assert source("```rust\nx\n```", language="rust") == "x"
    assert source("```python\nx\n```", language="rust") is None


def test_why_there_is_no_program_is_said() -> None:
    found = find_program("no", "last_block", language="python", unclosed_is_code=False)
    assert found.problem == "no code block of python or without a language"
    huge = find_program("x" * 1_000_001, "whole", language="python", unclosed_is_code=False)
    assert "longer than" in huge.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n  pass", True), ("async def f():\n  pass", True), ("f = lambda x: x", True),
        ("f: Callable = g", True), ("class f:\n  pass", True), ("import f", False),
        ("    def f(x):", False), ("def ff(x):", False), ("f == 1", False), ("", False),
    ],
)  # fmt: skip
def test_a_definition_is_found_without_parsing(text: str, *, expected: bool) -> None:
    assert defines(text, "f") is expected
