"""Programs that want to be paid without solving the task, in every tier of the sandbox here.

None of them may be paid; none of them may leave the grader without a verdict either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest
from sandbox_lab import TIERS, make_pool, report

from headrace.bench.verify_forgeries import FORGERIES, HONEST, row
from headrace.config import CodeConfig
from headrace.types import Outcome, Prompt
from headrace.verifiers.code.component import CodeComponent
from headrace.verifiers.component import Score
from headrace.verifiers.sandbox.execution import Executor

READS = {"tests": [
    {"input": f"{a} {b}\n", "output": f"{a + b}\n", "visible": a == 1}
    for a, b in ((1, 2), (5, 7), (10, -4), (40, 2))
]}  # fmt: skip
"""The same task by standard input and output."""

WRITES = {
    "exits at once": "raise SystemExit(0)",
    "leaves without a word": "import os\nos._exit(0)",
    "leaves with a right-looking word": "print('PASS')\nprint('4 passed')",
    "prints every small number": "print(*range(100), sep='\\n')",
    "prints the visible output": "print(3)",
    "writes on every descriptor": (
        "import os\nfor fd in range(3, 99):\n    try:\n        os.write(fd, b'3')\n"
        "    except OSError:\n        pass"
    ),
    "replaces standard output": (
        "import sys\nclass Any(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
        "sys.stdout = Any()"
    ),
    "writes right things to standard error": "import sys\nprint(3, file=sys.stderr)",
    "adds and then says more": "a, b = map(int, input().split())\nprint(a + b)\nprint('done')",
    "adds and then fails": "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)",
    "adds and then kills itself": (
        "import os, sys\na, b = map(int, input().split())\nprint(a + b)\nsys.stdout.flush()\n"
        "os.kill(os.getpid(), 9)"
    ),
    "adds and then never ends": (
        "import sys\na, b = map(int, input().split())\nprint(a + b)\nsys.stdout.flush()\n"
        "while True:\n    pass"
    ),
    "adds and then writes for ever": (
        "a, b = map(int, input().split())\nprint(a + b)\nwhile True:\n    print('x' * 9999)"
    ),
}


@pytest.fixture(scope="module", params=TIERS, ids=[tier.value for tier in TIERS])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if not report(request.param).works:
        pytest.skip(f"{request.param.value}: {report(request.param).detail}")
    pool = make_pool(request.param, num_cells=2)
    yield pool
    pool.close_blocking()


def score(sandbox: Executor, rows: Mapping[str, object], source: str, **options: object) -> Score:
    settings = {"cpu_seconds": 1.0, "wall_seconds": 30.0} | options
    component = CodeComponent(CodeConfig(kind="code", **settings), sandbox)
    prompt = Prompt(prompt_id="add", source="attacks", text="", token_ids=(0,), metadata=rows)
    return asyncio.run(component.score(prompt, f"```python\n{source}\n```"))


def test_the_honest_program_is_paid(sandbox: Executor) -> None:
    paid = score(sandbox, row(), HONEST)
    assert (paid.reward, paid.outcome) == (1.0, Outcome.PASS), paid.detail
    reads = "a, b = map(int, input().split())\nprint(a + b)"
    assert score(sandbox, READS, reads).reward == 1.0


@pytest.mark.parametrize("name", FORGERIES)
def test_a_function_that_does_not_add_is_paid_nothing(sandbox: Executor, name: str) -> None:
    found = score(sandbox, row(), FORGERIES[name])
    assert found.reward == 0.0, (name, found.detail)
    assert score(sandbox, row(), FORGERIES[name], credit="visible_then_heldout").reward == 0.0


@pytest.mark.parametrize("name", WRITES)
def test_a_program_that_does_not_add_is_paid_nothing(sandbox: Executor, name: str) -> None:
    found = score(sandbox, READS, WRITES[name])
    assert found.reward == 0.0, (name, found.detail)


def test_what_one_test_leaves_behind_another_does_not_find(sandbox: Executor) -> None:
    leaves = (
        "import os, builtins\nseen = sorted(os.listdir('.'))\nopen('seen', 'w').close()\n"
        "try:\n    open('/tmp/seen-by-grader', 'x').close()\nexcept FileExistsError:\n"
        "    seen = [1]\n"
        "except OSError:\n    pass\nprint(seen, hasattr(builtins, 'seen'))\nbuiltins.seen = 1"
    )  # fmt: skip
    rows = {"tests": [{"input": str(k), "output": "[] False"} for k in range(6)]}
    assert score(sandbox, rows, leaves).reward == 1.0
