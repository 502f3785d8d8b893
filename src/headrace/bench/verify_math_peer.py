"""math-verify on its own: reads tasks as lines of JSON, grades them, prints seconds and mistakes.

Run by `verify_math` as ``python -m headrace.bench.verify_math_peer``. What math-verify raises, as
for a timeout of its own, is a wrong verdict of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Grade every task on standard input; the clock starts when all is read and imported."""
    from math_verify import parse, verify

    tasks: list[dict[str, Any]] = [json.loads(line) for line in sys.stdin]
    verify(parse("$1$"), parse("$1$"))
    began = time.perf_counter()
    num_verdicts = num_wrong = 0
    for task in tasks:
        gold = parse(f"${task['gold']}$")
        for text, is_right in task["answers"]:
            found = verify(gold, parse(rf"So $\boxed{{{text}}}$"))
            num_wrong += bool(found) != is_right
            num_verdicts += 1
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "num_verdicts": num_verdicts, "num_wrong": num_wrong}))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
