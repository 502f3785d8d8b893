"""Rows as data sets publish them become tests, or are refused with the reason."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest

from headrace.config import CodeConfig
from headrace.verifiers.code import published
from headrace.verifiers.code.formats import read_task
from headrace.verifiers.code.published import UnreadableRowError
from headrace.verifiers.code.rows import RowTasks, written_out
from headrace.verifiers.code.task import CallTest, CodeTask, OutputTest

PUBLIC = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PRIVATE = [{"input": "3\n", "output": "4\n", "testtype": "stdin"},
           {"input": "5\n", "output": "6\n", "testtype": "stdin"}]  # fmt: skip


def config(**options: object) -> CodeConfig:
    return CodeConfig(kind="code", **options)


def task(row: dict[str, object], **options: object) -> CodeTask:
    return read_task(row, config(**options))


def refusal(row: dict[str, object], **options: object) -> str:
    with pytest.raises(UnreadableRowError) as error:
        read_task(row, config(**options))
    return str(error.value)


def packed(payload: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(payload, protocol=protocol))).decode()


def livecodebench(private: str, **columns: object) -> dict[str, object]:
    return {"public_test_cases": json.dumps(PUBLIC), "private_test_cases": private, **columns}


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
def test_livecodebench_private_tests_are_read_as_published(protocol: int) -> None:
    read = task(livecodebench(packed(json.dumps(PRIVATE), protocol)))
    assert read.visible[0].check == OutputTest(stdin="1\n", stdout="2\n")
    assert [test.check.stdout for test in read.heldout] == ["4\n", "6\n"]
    assert read == task(livecodebench(json.dumps(PRIVATE)))


def test_livecodebench_functional_tests_call_the_named_function() -> None:
    case = {"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}
    read = task(livecodebench(
        json.dumps([case]),
        public_test_cases="[]",
        metadata=json.dumps({"func_name": "solve"}),
        starter_code="class Solution:\n    def solve(self, a, b):\n        ",
    ))  # fmt: skip
    (test,) = read.tests
    assert test.check == CallTest(
        function="solve", arguments=([1, 2], "a"), expected=[3], from_json=True
    )
    assert "from typing import *" in read.prelude


class Evil:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self._path,))


def test_a_pickle_that_does_more_than_text_is_refused_and_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    assert "does more than text" in refusal(livecodebench(packed(Evil(trap))))
    assert not trap.exists()
    assert "does more than text" in refusal(livecodebench(packed(["a", "b"])))
    assert "does more than text" in refusal(livecodebench(packed(7)))


def test_damaged_or_swollen_private_tests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "neither JSON nor base64" in refusal(livecodebench("!!!"))
    unpacked = base64.b64encode(b"no zlib").decode()
    assert "neither JSON nor base64" in refusal(livecodebench(unpacked))
    junk = base64.b64encode(zlib.compress(b"junk")).decode()
    assert "no pickle" in refusal(livecodebench(junk))
    assert "is no JSON" in refusal(livecodebench(packed("{")))
    cut = base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-4]).decode()
    assert "cut off" in refusal(livecodebench(cut))
    monkeypatch.setattr(published, "MAX_TEST_BYTES", 1000)
    assert "more than 1000 bytes" in refusal(livecodebench(packed(" " * 5000)))


def test_humaneval_rows_keep_the_beginning_of_the_function() -> None:
    read = task({
        "prompt": "def add(a, b):\n    '''Adds.'''\n",
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    })  # fmt: skip
    assert read.header.startswith("def add")
    assert read.entry_point == "add"
    assert read.tests[0].check == CallTest(function="add", arguments=(1, 2), expected=3)


def test_mbpp_rows_show_their_list_and_hold_out_the_rest() -> None:
    read = task({
        "test_list": ["assert f(1) == 2", "assert set(f2) == 1 if False else f(2) == 3"][:1],
        "challenge_test_list": ["assert f(5) == 6"],
        "test": "inputs = [[7]]\nresults = [8]\nfor i, e in zip(inputs, results):\n"
                "    assert f(*i) == e",
        "test_setup_code": "import math",
        "test_imports": ["import re"],
    })  # fmt: skip
    assert [test.check.expected for test in read.visible] == [2]
    assert [test.check.expected for test in read.heldout] == [6, 8]
    assert read.prelude == "import re\nimport math"
    assert read.entry_point == "f"


def test_apps_rows_are_programs_or_functions() -> None:
    rows = {"inputs": ["1\n", ["2", "3"]], "outputs": ["1\n", ["5"]]}
    read = task({"input_output": json.dumps(rows)})
    assert {test.check for test in read.tests} == {
        OutputTest(stdin="1\n", stdout="1\n"), OutputTest(stdin="2\n3", stdout="5")}  # fmt: skip
    calls = {"fn_name": "f", "inputs": [[1, [2]], [3, []]], "outputs": [[True], [[4]]]}
    read = task({"input_output": json.dumps(calls)})
    assert {repr(test.check.expected) for test in read.tests} == {"True", "[4]"}
    calls["outputs"] = [True, [4]]
    read = task({"input_output": json.dumps(calls)})
    assert {repr(test.check.expected) for test in read.tests} == {"True", "[4]"}


def test_own_rows_spell_each_kind_of_test_and_who_may_see_it() -> None:
    read = task({"tests": [
        {"input": "1", "output": "2"},
        {"function": "f", "arguments": [1], "returns": (2,), "visible": False},
        {"assert": "assert f(3) == 4", "visible": False},
    ]})  # fmt: skip
    assert [test.visible for test in read.tests] == [True, False, False]
    assert [test.test_id for test in read.tests] == ["1", "held-out 1", "held-out 2"]


def test_without_private_tests_a_declared_share_is_held_out_always_the_same_one() -> None:
    row: dict[str, object] = {"test_list": [f"assert f({i}) == {i}" for i in range(10)]}
    assert len(task(row).heldout) == 5
    assert len(task(row, heldout_share=0.0).heldout) == 1
    assert len(task(row, heldout_share=1.0).heldout) == 10
    assert task(row) == task(row)
    others: dict[str, object] = {"test_list": [f"assert f({i}) == {i}" for i in range(1, 11)]}
    held = {test.test_id for test in task(row).heldout}
    assert held != {test.test_id for test in task(others).heldout}


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"tests": []}, {}, "no test at all"),
        ({"test_list": []}, {}, "no test at all"),
        ({"input_output": '{"inputs": [], "outputs": []}'}, {}, "no test at all"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, {}, "no test at all"),
        ({"test": "x = 1", "entry_point": "f"}, {}, "no test at all"),
        ({"input_output": ""}, {}, "is empty or missing"),
        ({"other": 1}, {}, "no column that holds tests; the columns are other"),
        ({}, {}, "the columns are none"),
        ({"tests": "not json"}, {}, "is no JSON"),
        ({"tests": "[" * 100_000}, {}, "nested too deeply"),
        ({"tests": [{"input": 1, "output": "1"}]}, {}, "must be"),
        ({"tests": 7}, {}, "must hold a list of tests"),
        ({"test_list": ["assert f(x) == 1"]}, {}, "1 asserts cannot be turned into data"),
        ({"test_list": ["assert f(x) == 1"]}, {"unreadable_asserts": "drop"}, "no test at all"),
        ({"test_list": [1]}, {}, "list of asserts"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, {}, "as many outputs"),
        ({"input_output": '{"inputs": [1], "outputs": ["1"]}'}, {}, "must be text"),
        ({"input_output": '{"fn_name": "f", "inputs": [1], "outputs": [1]}'}, {}, "arguments"),
        ({"test_list": ["assert f(1) == 1"]}, {"language": "cpp"}, "stdin alone"),
        ({"public_test_cases": '[{"input": "1", "output": "1", "testtype": "functional"}]'}, {},
         "no func_name"),
        ({"public_test_cases": '[{"input": "1", "output": "1"}]'}, {}, "testtype"),
        ({"tests": [{"function": "f", "arguments": [object()], "returns": 1}]}, {},
         "cannot be sent"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_graded_is_refused_with_the_reason(
    row: dict[str, object], options: dict[str, object], reason: str
) -> None:
    assert reason in refusal(row, **options)


def test_dropped_asserts_are_counted_and_told() -> None:
    rows = RowTasks({"code": config(unreadable_asserts="drop")})
    row = {"test_list": ["assert f(1) == 1", "assert f(x) == 1", "assert f(y) == 1"]}
    assert rows.problem(row) is None
    assert rows.problem({"test_list": ["assert f(1) == 1"]}) is None
    (note,) = rows.notes()
    assert note.startswith("2 asserts of 1 rows")
    assert RowTasks({"code": config()}).problem(row) is not None


def test_visible_tests_are_written_as_a_policy_may_read_them() -> None:
    row = {"test_list": ["assert sorted(f((1,), 'a')) == {2: None}", "assert abs(f(1) - 2) < 0.5"],
           "challenge_test_list": ["assert f(9) == 9"]}  # fmt: skip
    assert written_out(task(row).visible) == (
        "assert sorted(f((1,), 'a')) == {2: None}\nassert abs(f(1) - 2) < 0.5"
    )
    text = RowTasks({"code": config()}).shown(livecodebench(packed(json.dumps(PRIVATE))))
    assert text == "Input:\n1\nOutput:\n2\n"
