from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from headrace.data import LoadReport, PromptTokenizer
from headrace.errors import DataError, ModelError
from headrace.types import Message

Load = Callable[..., LoadReport]
GOOD = {"prompt": "2+2=", "answer": "4"}


def problems_of(load: Load, rows: list[Any], **options: Any) -> tuple[str, ...]:  # noqa: ANN401 - passed on
    """Load in both modes and return the lines; the modes must agree on what is wrong."""
    with pytest.raises(DataError) as caught:
        load(rows, **options)
    report = load([*rows, {"prompt": "the only good one", "answer": "1"}], on_bad_row="skip")
    assert len(report.prompts) >= 1
    lines = caught.value.problems
    assert all("rows.jsonl, line" in line or "no usable row" in line for line in lines)
    return tuple(line.rpartition("rows.jsonl")[2].lstrip(", ") for line in lines)


def test_a_row_becomes_a_prompt_with_the_ids_the_policy_will_see(load: Load) -> None:
    report = load([GOOD | {"level": 3}], system_prompt="Be brief.", user_template="{{Q}} {prompt}")
    (prompt,) = report.prompts
    rendered = "<system>Be brief.</><user>{{Q}} 2+2=</><assistant>"
    assert "".join(map(chr, prompt.token_ids)) == rendered
    assert (prompt.text, prompt.answer, prompt.source) == ("{{Q}} 2+2=", "4", "train")
    assert prompt.metadata == {"level": 3}
    assert (report.num_rows, report.num_skipped, report.problems) == (1, 0, ())


def test_braces_in_a_prompt_are_left_alone(load: Load) -> None:
    report = load([{"prompt": r"\frac{1}{2} {0} {prompt}", "answer": "4"}], template="raw")
    assert "".join(map(chr, report.prompts[0].token_ids)) == r"\frac{1}{2} {0} {prompt}"


def test_a_conversation_keeps_its_own_system_message(load: Load) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "two"},
    ]
    report = load(
        [{"prompt": messages, "answer": 7}], system_prompt="other", user_template="{prompt}!"
    )
    (prompt,) = report.prompts
    rendered = "<system>S</><user>one</><assistant>A</><user>two</><assistant>"
    assert "".join(map(chr, prompt.token_ids)) == rendered
    assert (prompt.text, prompt.answer) == ("one\n\ntwo", "7")


def test_three_bad_rows_of_ten_are_named_and_the_lenient_mode_keeps_seven(load: Load) -> None:
    rows: list[Any] = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    rows[2] = {"prompt": "2+1="}
    rows[5] = {"prompt": "5+1=", "answer": "  "}
    rows[8] = {"answer": "9", "promt": "8+1="}
    with pytest.raises(DataError) as caught:
        load(rows)
    assert [line.rpartition("rows.jsonl, ")[2] for line in caught.value.problems] == [
        'line 3: no column "answer"; the columns are prompt',
        'line 6: column "answer" is empty',
        'line 9: no column "prompt"; the columns are answer, promt; did you mean "promt"?',
    ]
    report = load(rows, on_bad_row="skip")
    assert report.problems == caught.value.problems
    assert (len(report.prompts), report.num_rows, report.num_skipped) == (7, 10, 3)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "answer": None}, 'column "answer" is empty'),
        (
            {"prompt": "a", "answer": ["4"]},
            'column "answer" must hold text or a finite number (found list)',
        ),
        (
            {"prompt": "a", "answer": True},
            'column "answer" must hold text or a finite number (found bool)',
        ),
        (
            {"prompt": "a", "answer": float("nan")},
            'column "answer" must hold text or a finite number (found nan)',
        ),
        (
            {"prompt": 3, "answer": "4"},
            'column "prompt" must hold text or a list of messages (found int)',
        ),
        ({"prompt": " \n", "answer": "4"}, 'column "prompt" is empty'),
        ({"prompt": [], "answer": "4"}, 'column "prompt" holds no message'),
        (
            {"prompt": [{"role": "user", "content": "a", "name": "b"}], "answer": "4"},
            'a message must be {"role": text, "content": text} and nothing else (message 1)',
        ),
        (
            {"prompt": [{"role": "user", "content": None}], "answer": "4"},
            'a message must be {"role": text, "content": text} and nothing else (message 1)',
        ),
        (
            {"prompt": [{"role": "robot", "content": "a"}], "answer": "4"},
            (
                "the role of a message must be one of system, user, assistant "
                "(message 1 has 'robot')"
            ),
        ),
        (
            {"prompt": [{"role": "assistant", "content": "a"}], "answer": "4"},
            'the last message of column "prompt" must be the user\'s (found assistant)',
        ),
        (
            {"prompt": [{"role": "user", "content": ""}], "answer": "4"},
            'the last message of column "prompt" is empty',
        ),
        (
            {
                "prompt": [{"role": role, "content": "a"} for role in ("system", "system", "user")],
                "answer": "4",
            },
            ("the conversation cannot be rendered (only one system message is supported)"),
        ),
    ],
)
def test_a_row_that_cannot_be_used_says_why(load: Load, row: Any, problem: str) -> None:  # noqa: ANN401 - any JSON
    assert f"line 2: {problem}" in problems_of(load, [GOOD, row])


def test_both_faults_of_one_row_are_told(load: Load) -> None:
    lines = problems_of(load, [GOOD, {"prompt": "", "answer": ""}])
    assert lines == ('line 2: column "prompt" is empty', 'line 2: column "answer" is empty')


def test_the_same_fault_in_many_rows_is_one_line_and_hides_no_other(load: Load) -> None:
    rows: list[Any] = [{"prompt": f"{n}", "solution": "4"} for n in range(1000)]
    rows[700] = '{"prompt": '
    lines = problems_of(load, rows, answer_column="solutions")
    assert lines == (
        (
            "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 989 more: "
            'no column "solutions"; the columns are prompt, solution; did you mean "solution"?'
        ),
        "line 701: not JSON (Expecting value at column 12)",
        ": no usable row; 1000 read, 1000 with a fault, 0 also in the other source",
    )


def test_faults_of_very_many_kinds_are_cut_off_with_their_number(load: Load) -> None:
    rows = [{"answer": "1", f"column{n}": 1} for n in range(50)]
    report = load([GOOD, *rows], on_bad_row="skip")
    assert len(report.problems) == 21
    assert report.problems[-1].endswith("and 30 more faults of other kinds")
    assert report.num_skipped == 50


def test_length_is_measured_on_the_rendered_ids_and_each_limit_is_named(load: Load) -> None:
    # Line 2 is 32 characters alone and 52 as rendered: it fits unless the template is counted.
    rows = [GOOD, {"prompt": "x" * 32, "answer": "1"}, {"prompt": "x" * 62, "answer": "1"}]
    options = {"max_prompt_tokens": 50, "max_context": 100, "max_tokens": 40}
    with pytest.raises(DataError) as caught:
        load(rows, **options)
    assert [line.rpartition("rows.jsonl, ")[2] for line in caught.value.problems] == [
        "lines 2 (52 tokens) and 3 (82 tokens): longer than data.max_prompt_tokens = 50",
        (
            "line 3: prompt and completion (max_tokens = 40) do not fit the model's context "
            "of 100 tokens (82 + 40)"
        ),
    ]
    assert len(load(rows, **options, on_bad_row="skip").prompts) == 1


def test_a_prompt_that_renders_to_nothing_is_a_fault(load: Load) -> None:
    class Mute:
        has_chat_template = True

        def encode(self, _: str) -> tuple[int, ...]:
            return ()

        def render(self, _: object) -> tuple[int, ...]:
            return ()

    with pytest.raises(DataError, match="renders to no token at all"):
        load([GOOD], tokenizer=Mute())


def test_an_answer_the_verifier_cannot_use_is_a_fault_at_load(load: Load) -> None:
    rows = [GOOD, {"prompt": "b", "answer": "\\frac{"}]

    def check(answer: str, columns: Mapping[str, object]) -> str | None:
        assert columns["answer"] == answer
        return None if answer.isdigit() else f"{answer} is no number"

    with pytest.raises(DataError, match=r"line 2: .*cannot be used \(\\frac\{ is no number\)"):
        load(rows, check_answer=check)


def test_no_answer_is_needed_when_no_verifier_compares_with_one(load: Load) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": ["x"]}, {"prompt": "c", "answer": 3.5}]
    answers = [prompt.answer for prompt in load(rows, needs_answer=False).prompts]
    assert answers == [None, None, "3.5"]


def test_settings_that_do_not_fit_are_told_together_with_the_rows(
    load: Load,
    tokenizer: Any,  # noqa: ANN401 - the fake of conftest
) -> None:
    plain: PromptTokenizer = dataclasses.replace(tokenizer, has_chat_template=False)
    rows = [GOOD, {"prompt": ""}]
    with pytest.raises(DataError) as caught:
        load(rows, tokenizer=plain, answer_column=None, on_bad_row="skip")
    template, answer_column, row = caught.value.problems
    assert template.startswith('data.template = "chat": the tokenizer of this model has no chat')
    assert answer_column.startswith("data.train.answer_column = null: the verifier compares")
    assert row.endswith('line 2: column "prompt" is empty')


def test_messages_need_the_chat_template(load: Load) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "answer": "1"}
    with pytest.raises(
        DataError, match=r'line 1: a list of messages needs data\.template = "chat"'
    ):
        load([row], template="raw")


def test_an_id_depends_on_source_content_and_answer_and_on_no_template(load: Load) -> None:
    first = load([GOOD]).prompts[0].prompt_id
    # Pinned: the ids of a run in progress must not change with a new version of the package.
    assert first == "c5b4a5731a53a48c"
    assert load([{"prompt": "other", "answer": "4"}, GOOD]).prompts[1].prompt_id == first
    assert load([GOOD], user_template="Q: {prompt}", template="raw").prompts[0].prompt_id == first
    assert load([GOOD], source_name="eval").prompts[0].prompt_id != first
    assert load([GOOD | {"answer": "5"}]).prompts[0].prompt_id != first


def test_ids_of_the_rows_own_are_taken_as_text(load: Load) -> None:
    rows = [GOOD | {"id": 12}, GOOD | {"id": "a/b"}]
    assert [prompt.prompt_id for prompt in load(rows, id_column="id").prompts] == ["12", "a/b"]
    with pytest.raises(DataError, match=r'column "id" must hold text or a whole number'):
        load([GOOD | {"id": 1.5}], id_column="id")


def test_a_repeated_row_or_id_is_reported_with_the_row_it_repeats(load: Load) -> None:
    other = {"prompt": "1+1=", "answer": "2"}
    assert problems_of(load, [GOOD, other, GOOD]) == (
        "line 3: repeats the prompt and answer of an earlier row (as line 1)",
    )
    with pytest.raises(
        DataError, match=r"line 2: .*repeats the id of an earlier row \('7', as lin"
    ):
        load([GOOD | {"id": 7}, other | {"id": "7"}], id_column="id")


def test_prompts_used_elsewhere_are_left_out_and_counted(load: Load) -> None:
    rows = [{"prompt": f"{n}", "answer": "1"} for n in range(5)]
    report = load(rows, exclude={"1", "3", "absent"})
    assert [prompt.text for prompt in report.prompts] == ["0", "2", "4"]
    assert (report.num_excluded, report.num_skipped, report.problems) == (2, 0, ())
    with pytest.raises(DataError, match="no usable row; 5 read, 0 with a fault, 5 also in"):
        load(rows, exclude={str(n) for n in range(5)})


def test_a_limit_counts_rows_from_the_start(load: Load) -> None:
    rows: list[Any] = [{"prompt": f"{n}", "answer": "1"} for n in range(5)]
    report = load(rows, limit=2)
    assert ([prompt.text for prompt in report.prompts], report.num_rows) == (["0", "1"], 2)


def test_an_empty_file_is_a_data_error_in_both_modes(load: Load) -> None:
    for mode in ("stop", "skip"):
        with pytest.raises(DataError, match="no usable row; 0 read"):
            load([], on_bad_row=mode)


@pytest.mark.parametrize("answer", [["4", "four"], {"value": 4}, True])
def test_an_answer_no_verifier_compares_with_is_kept_for_the_reward_function(
    load: Load, answer: object
) -> None:
    (prompt,) = load([{"prompt": "2+2=", "answer": answer}], needs_answer=False).prompts
    assert prompt.answer is None
    assert prompt.metadata == {"answer": answer}


@pytest.mark.parametrize("template", ["raw", "chat"])
def test_a_prompt_the_tokenizer_refuses_is_a_fault_of_its_row(load: Load, template: str) -> None:
    class Digits:
        has_chat_template = True

        def encode(self, text: str) -> tuple[int, ...]:
            if text.isdigit():
                return (int(text),)
            refusal = "no token for it"
            raise ModelError(refusal)

        def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
            return self.encode(messages[-1].content)

    rows = [{"prompt": "12", "answer": "1"}, {"prompt": "twelve", "answer": "1"}]
    options: dict[str, Any] = {"tokenizer": Digits(), "template": template}
    with pytest.raises(DataError, match=r"line 2: .*\(no token for it\)"):
        load(rows, **options)
    report = load(rows, on_bad_row="skip", **options)
    assert [prompt.text for prompt in report.prompts] == ["12"]
    assert report.num_skipped == 1
