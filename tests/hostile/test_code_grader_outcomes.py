"""What honest and careless programs are paid, in the strongest tier of this machine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping

import pytest
from sandbox_lab import make_pool, strongest

from headrace.config import CodeConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.component import Score
from headrace.verifiers.sandbox.execution import Executor

CALL = {"test_list": ["assert f(3) == 3", "assert f(4) == 4"]}
ECHO = {"tests": [{"input": "7\n", "output": "7\n"}]}
SILENT = {"tests": [{"input": "7\n", "output": ""}]}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Executor]:
    pool = make_pool(strongest())
    yield pool
    pool.close_blocking()


def score(sandbox: Executor, row: Mapping[str, object], source: str, **options: object) -> Score:
    language = options.get("language", "python")
    limits = {"cpu_seconds": 1.0, "wall_seconds": 30.0, "memory_mib": 128, "output_kib": 512}
    component = CodeComponent(CodeConfig(kind="code", **(limits | options)), sandbox)
    prompt = Prompt(prompt_id="p", source="train", text="", token_ids=(0,), metadata=row)
    return asyncio.run(component.score(prompt, f"```{language}\n{source}\n```"))


@pytest.mark.parametrize(
    ("row", "source"),
    [
        (ECHO, "print(input())"),
        (ECHO, "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"),
        (ECHO, "if __name__ == '__main__':\n    print(input())"),
        (ECHO, "import threading\nthreading.Thread(target=lambda: print(input())).start()"),
        (ECHO, "import asyncio\nasync def main():\n    print(input())\nasyncio.run(main())"),
        (ECHO, "import atexit\natexit.register(lambda: print(input()))"),
        (CALL, "def f(x):\n    return x"),
        (CALL, "class Solution:\n    def f(self, x):\n        return x"),
        (CALL, "from functools import lru_cache\n@lru_cache\ndef f(x):\n    return x"),
        (CALL, "print('noise')\ndef f(x):\n    print('more noise')\n    return float(x)"),
        ({"test_list": ["assert f(5000) == 10**5000"]}, "def f(n):\n    return 10**n"),
        ({"test_list": ["assert f() == 'x' * 200_000"]}, "def f():\n    return 'x' * 200_000"),
        ({"tests": [{"input": "", "output": "1" + "0" * 5000}]}, "print(10**5000)"),
        ({"tests": [{"input": "", "output": "x\n" * 100_000}]}, "print('x\\n' * 100_000)"),
        ({"tests": [{"input": "1\n" * 50_000, "output": "50000"}]},
         "import sys\nprint(sum(map(int, sys.stdin)))"),
        (SILENT, "pass"),
        ({"test_list": ["assert sorted(f()) == [1, 2]"]}, "def f():\n    return {2, 1}"),
        ({"test_list": ["assert abs(f() - 0.3) < 1e-6"]}, "def f():\n    return 0.1 + 0.2"),
    ],
)  # fmt: skip
def test_a_right_program_is_paid(sandbox: Executor, row: Mapping[str, object], source: str) -> None:
    found = score(sandbox, row, source)
    assert (found.reward, found.outcome) == (1.0, Outcome.PASS), found.detail


@pytest.mark.parametrize(
    ("row", "source", "outcome"),
    [
        (ECHO, "print(8)", Outcome.WRONG),
        (ECHO, "print(input", Outcome.RUNTIME),
        (SILENT, "raise ValueError", Outcome.RUNTIME),
        (CALL, "def g(x):\n    return x", Outcome.RUNTIME),
        (CALL, "f = 3", Outcome.RUNTIME),
        (CALL, "def f(x):\n    return x\n# \0", Outcome.RUNTIME),
        (CALL, "def f(x):\n    return x\n# \ud800", Outcome.RUNTIME),
        (CALL, "def f(x):\n    return " + "(" * 5000 + ")" * 5000, Outcome.RUNTIME),
        (CALL, "def f():\n    return 3", Outcome.RUNTIME),
        (CALL, "def f(x):\n    return f(x)", Outcome.RUNTIME),
        (CALL, "def f(x):\n    import ctypes\n    ctypes.string_at(0)", Outcome.RUNTIME),
        (CALL, "async def f(x):\n    return x", Outcome.WRONG),
        (CALL, "def f(x):\n    yield x", Outcome.WRONG),
        (CALL, "def f(x):\n    return object()", Outcome.WRONG),
        (CALL, "def f(x):\n    return [x]", Outcome.WRONG),
        (CALL, "def f(x):\n    while True:\n        pass", Outcome.TIMEOUT_CPU),
        (ECHO, "while True:\n    print('x' * 10_000)", Outcome.OUTPUT_LIMIT),
        (CALL, "def f(x):\n    return bytearray(1 << 30)", Outcome.OOM),
    ],
)
def test_how_another_one_fails_is_told(
    sandbox: Executor, row: Mapping[str, object], source: str, outcome: Outcome
) -> None:
    found = score(sandbox, row, source)
    assert (found.reward, found.outcome) == (0.0, outcome), found.detail


def test_what_a_function_returned_that_cannot_be_compared_is_named(sandbox: Executor) -> None:
    found = score(sandbox, CALL, "class Pair:\n    pass\ndef f(x):\n    return Pair()")
    assert "Pair" in found.detail


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")
def test_a_program_in_another_language_is_graded_by_what_it_writes(sandbox: Executor) -> None:
    source = '#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x << "\\n"; }'
    options = {"language": "cpp", "memory_mib": 512, "cpu_seconds": 20.0, "wall_seconds": 60.0}
    assert score(sandbox, ECHO, source, **options).reward == 1.0
    wrong = score(sandbox, ECHO, source.replace("<< x", "<< x + 1"), **options)
    assert wrong.outcome is Outcome.WRONG
    broken = score(sandbox, ECHO, "int main( {", **options)
    assert (broken.reward, broken.outcome) == (0.0, Outcome.RUNTIME), broken.detail
