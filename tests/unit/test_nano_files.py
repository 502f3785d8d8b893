"""The bundled nano data and model are what their README says, checked without the maker's code."""

import hashlib
import json
import operator
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import headrace

NANO = Path(headrace.__file__).parent / "recipes" / "nano"
SIDES = ("train", "heldout")
PROBLEM = re.compile(r"[1-9]([+-][1-9]){2,4}=")
OPERATORS = {"+": operator.add, "-": operator.sub}

Rows = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return {
        side: [json.loads(line) for line in (NANO / f"{side}.jsonl").read_text().splitlines()]
        for side in SIDES
    }


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(NANO / "model")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(NANO / "model")


def totals(prompt: str) -> list[int]:
    """Evaluate one character at a time, as a person would."""
    found = [int(prompt[0])]
    for symbol, digit in zip(prompt[1:-1:2], prompt[2::2], strict=True):
        found.append(OPERATORS[symbol](found[-1], int(digit)))
    return found


def test_the_files_have_the_promised_number_of_rows(rows: Rows) -> None:
    assert {side: len(rows[side]) for side in SIDES} == {"train": 8192, "heldout": 512}


@pytest.mark.parametrize("side", SIDES)
def test_every_row_is_a_problem_and_its_answer_and_nothing_else(rows: Rows, side: str) -> None:
    assert all(row.keys() == {"prompt", "answer"} for row in rows[side])
    assert all(PROBLEM.fullmatch(row["prompt"]) for row in rows[side])


@pytest.mark.parametrize("side", SIDES)
def test_no_problem_is_there_twice(rows: Rows, side: str) -> None:
    assert len({row["prompt"] for row in rows[side]}) == len(rows[side])


def test_train_and_held_out_share_no_problem(rows: Rows) -> None:
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["heldout"]}


@pytest.mark.parametrize("side", SIDES)
def test_the_hash_of_its_text_puts_each_problem_on_its_side(rows: Rows, side: str) -> None:
    def is_held_out(prompt: str) -> bool:
        return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[-1] % 8 == 0

    assert {is_held_out(row["prompt"]) for row in rows[side]} == {side == "heldout"}


@pytest.mark.parametrize("side", SIDES)
def test_every_answer_is_right(rows: Rows, side: str) -> None:
    assert [row["answer"] for row in rows[side]] == [
        str(totals(row["prompt"])[-1]) for row in rows[side]
    ]


@pytest.mark.parametrize("side", SIDES)
def test_no_running_total_is_negative(rows: Rows, side: str) -> None:
    assert min(min(totals(row["prompt"])) for row in rows[side]) >= 0


def test_the_held_out_side_has_the_same_mix_of_lengths_as_the_train_side(rows: Rows) -> None:
    def shares(side: str) -> list[float]:
        lengths = [len(row["prompt"]) for row in rows[side]]
        return [lengths.count(length) / len(lengths) for length in (6, 8, 10)]

    assert shares("heldout") == pytest.approx(shares("train"), abs=0.01)


@pytest.mark.parametrize("side", SIDES)
def test_the_tokenizer_gives_back_every_row_one_token_per_character(
    rows: Rows, side: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [row["prompt"] + row["answer"] for row in rows[side]]
    ids = tokenizer(texts)["input_ids"]
    assert [len(row) for row in ids] == [len(text) for text in texts]
    assert tokenizer.batch_decode(ids) == texts


def test_a_completion_decodes_without_its_end_and_without_spaces(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = tokenizer.encode("+2:10-5:5+9:14$__")
    assert tokenizer.decode(ids) == "+2:10-5:5+9:14$__"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "+2:10-5:5+9:14"


def test_the_tokenizer_refuses_a_character_it_does_not_know(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("1 +2=")


def test_model_tokenizer_and_generation_config_agree_on_the_vocabulary(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    vocabulary = tokenizer.get_vocab()
    assert set(vocabulary) == set("0123456789+-=:$_")
    assert sorted(vocabulary.values()) == list(range(model.config.vocab_size))
    assert tokenizer.bos_token_id is None
    special = {"eos_token_id": vocabulary["$"], "pad_token_id": vocabulary["_"]}
    for holder in (tokenizer, model.config, model.generation_config):
        assert {name: getattr(holder, name) for name in special} == special


def test_the_generation_config_leaves_sampling_to_the_caller() -> None:
    names = json.loads((NANO / "model" / "generation_config.json").read_text()).keys()
    assert names == {"eos_token_id", "pad_token_id", "transformers_version"}


def test_the_model_is_fp32_finite_and_small(model: torch.nn.Module) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert (NANO / "model" / "model.safetensors").stat().st_size < 3_000_000


def test_the_model_writes_out_totals_and_ends(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer("8-5-2=", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(
            input_ids=prompt["input_ids"],
            attention_mask=prompt["attention_mask"],
            max_new_tokens=24,
            do_sample=False,
        )
    assert tokenizer.decode(ids[0]) == "8-5-2=-5:3-2:1$"
