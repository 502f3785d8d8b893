from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.errors import ModelError
from headrace.models.tokenizer import Tokenizer
from headrace.types import Message

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER = [Message(role="user", content="hi")]


def _backend() -> Backend:
    """Byte-level without merges: every text has ids, one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|text|>"]
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return backend


def _write(directory: Path, **settings: object) -> Path:
    directory.mkdir(exist_ok=True)
    _backend().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return _write(tmp_path, chat_template=TEMPLATE)


def test_encoding_adds_no_special_token(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert len(tokenizer.encode("8+2=")) == 4
    assert tokenizer.encode("") == ()


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path_factory.getbasetemp() / "any"))
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_special_tokens_are_left_out_of_decoded_text_unless_asked_for(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode("14<|end|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "14"
    assert tokenizer.decode(ids, skip_special=False) == "14<|end|>"


def test_a_conversation_renders_up_to_the_policys_turn(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    text = tokenizer.decode(tokenizer.render(USER), skip_special=False)
    assert text == "<|user|>hi<|end|><|assistant|>"


def test_a_template_file_wins_over_the_one_in_the_config(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.render(USER)) == "hi!"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template=named))
    assert tokenizer.decode(tokenizer.render(USER)) == "yes"


def test_an_old_template_file_is_read_too(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.render(USER)) == "old"


def test_without_a_template_rendering_says_to_use_raw_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="raw prompts"):
        tokenizer.render(USER)


def test_a_template_that_refuses_a_conversation_is_a_model_error_with_its_words(
    tmp_path: Path,
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template=template))
    with pytest.raises(ModelError, match="roles must alternate"):
        tokenizer.render(USER)


def test_a_broken_template_names_directory_and_line(tmp_path: Path) -> None:
    _write(tmp_path, chat_template="fine\n{% if %}")
    with pytest.raises(ModelError, match=r"chat template of .* is broken in line 2"):
        Tokenizer.load(tmp_path)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__ }}"
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template=template))
    with pytest.raises(ModelError, match="unsafe"):
        tokenizer.render(USER)


def test_a_template_that_asks_for_the_date_is_the_same_on_every_day(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}"))
    assert tokenizer.decode(tokenizer.render(USER)) == "26 Jul 2024"


def test_template_extensions_of_hugging_face_are_understood(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template=template))
    text = tokenizer.decode(tokenizer.render([Message(role="user", content="<é>")]))
    assert text == '{"role": "user", "content": "<é>"}'


def test_eos_ids_are_the_union_over_all_files_without_repeats(directory: Path) -> None:
    end = _backend().token_to_id("<|end|>")
    text = _backend().token_to_id("<|text|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, text]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.load(directory).eos_token_ids == (end, text, 7)


def test_an_eos_token_written_as_an_object_is_understood(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path, eos_token={"content": "<|end|>", "special": True}))
    assert tokenizer.eos_token_ids == (_backend().token_to_id("<|end|>"),)


def test_without_any_eos_there_is_none(tmp_path: Path) -> None:
    assert Tokenizer.load(_write(tmp_path, eos_token=None)).eos_token_ids == ()


def test_truncation_and_padding_left_on_in_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = _backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=5)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("1234567")) == 7
    assert len(tokenizer.encode("1")) == 1


def test_saved_files_load_as_the_same_tokenizer(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    tokenizer = Tokenizer.load(directory)
    tokenizer.save(target)
    assert Tokenizer.load(target).render(USER) == tokenizer.render(USER)
    assert (target / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_a_directory_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; write one with transformers"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_file_is_named(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(("content", "fault"), [("{", "not valid JSON"), ("[]", "JSON object")])
def test_a_damaged_tokenizer_config_is_named(directory: Path, content: str, fault: str) -> None:
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json .*{fault}"):
        Tokenizer.load(directory)


def test_a_template_that_fails_on_a_conversation_is_a_model_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_write(tmp_path, chat_template="{{ messages[0]['content'] + 1 }}"))
    with pytest.raises(ModelError, match="chat template"):
        tokenizer.render(USER)


def test_a_text_the_vocabulary_does_not_cover_is_a_model_error(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0})).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == (0,)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot encode .*Missing \[UNK\]"):
        tokenizer.encode("b")


@pytest.mark.parametrize("template", [["default"], [{"name": "default"}]])
def test_a_list_of_templates_of_another_form_is_a_model_error(
    template: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"chat_template .* must be text or a list of"):
        Tokenizer.load(_write(tmp_path, chat_template=template))


def test_a_template_file_that_is_not_utf_8_is_a_model_error(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.load(tmp_path)
