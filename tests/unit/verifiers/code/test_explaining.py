from __future__ import annotations

from code_lab import Grade

from headrace.verifiers.code.explaining import explain

ROW = {"tests": [{"input": f"{i}", "output": f"{i}", "visible": i == 0} for i in range(4)]}


def test_an_explanation_has_the_program_and_a_line_for_each_test(grade: Grade) -> None:
    lines = explain(grade(ROW, "```python\nprint(input())\n```"))
    assert lines[0] == "reward 1.0: 4 of 4 tests passed [none]"
    assert "   1  print(input())" in lines
    table = lines[lines.index(next(line for line in lines if line.startswith("test "))) :]
    assert [line.split()[0] for line in table] == ["test", "1", "held-out", "held-out", "held-out"]
    assert all("pass" in line for line in table[1:])


def test_an_explanation_says_what_was_not_run_and_why_there_is_no_program(grade: Grade) -> None:
    lines = explain(grade(ROW, "```python\nprint(0)\n```", tests_at_once=1))
    assert lines[-1] == "2 more were not run: the reward was settled"
    (line,) = explain(grade(ROW, "nothing"))
    assert line == "reward 0.0: no code block of python or without a language"
