"""Prompts to tokens: templates, markers, BOS and EOS."""

import json

import pytest
from transformers import LlamaConfig

from areno.errors import UsageError
from areno.text.chat import (
    encode_generation_prompt,
    encode_rendered,
    eos_token_ids,
    load_tokenizer,
    render_generation_prompt,
)

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi fox"}]


def _text(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_text_becomes_a_user_turn_of_the_template(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    ids = encode_generation_prompt(tokenizer, "the fox")
    assert _text(tokenizer, ids) == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_messages_are_rendered_by_the_template_unchanged(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    assert _text(tokenizer, encode_generation_prompt(tokenizer, MESSAGES)) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi fox<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("marker", ["<|im_start|>", "<start_of_turn>", "<turn|>", "<|user|>", "<|assistant|>"])
def test_text_with_chat_markers_is_left_alone(make_tokenizer, chatml, marker):
    tokenizer = make_tokenizer(chat_template=chatml)
    assert render_generation_prompt(tokenizer, f"{marker}user\nfox").text == f"{marker}user\nfox"


def test_without_a_template_text_stays_text_and_messages_become_lines(make_tokenizer):
    tokenizer = make_tokenizer()
    assert _text(tokenizer, encode_generation_prompt(tokenizer, "the fox")) == "the fox"
    rendered = render_generation_prompt(tokenizer, MESSAGES)
    assert rendered.text == "system: be brief\nuser: hi fox\nassistant:"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("prompt", ["the fox", "<s>the fox", "<s><|im_start|>user", "<|im_start|>user", MESSAGES])
def test_there_is_exactly_one_bos_in_plain_text(make_tokenizer, kind, prompt):
    tokenizer = make_tokenizer(kind, add_bos=True)
    ids = encode_generation_prompt(tokenizer, prompt)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_template_that_writes_bos_gets_no_second_one(make_tokenizer, chatml):
    tokenizer = make_tokenizer(add_bos=True, chat_template="{{ bos_token }}" + chatml)
    assert encode_generation_prompt(tokenizer, "the fox").count(tokenizer.bos_token_id) == 1


def test_tokenizer_that_adds_no_bos_gets_none(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.bos_token_id not in encode_generation_prompt(tokenizer, "the fox")


def test_thinking_is_switched_off_only_when_asked(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    assert not render_generation_prompt(tokenizer, "fox").text.endswith("<think></think>")
    assert render_generation_prompt(tokenizer, "fox", disable_thinking=True).text.endswith("<think></think>")


def test_tokenizer_that_does_not_know_the_thinking_switch_is_called_without_it(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)

    class Strict(type(tokenizer)):
        def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
            return super().apply_chat_template(
                conversation, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    tokenizer.__class__ = Strict
    assert render_generation_prompt(tokenizer, "fox", disable_thinking=True).text.endswith("assistant\n")


def test_messages_that_the_template_refuses_are_a_usage_error(make_tokenizer, chatml):
    tokenizer = make_tokenizer(chat_template=chatml)
    with pytest.raises(UsageError, match=r"roles bad: unknown role"):
        encode_generation_prompt(tokenizer, [{"role": "bad", "content": "x"}])


def test_many_prompts_at_once_give_the_same_ids_as_one_by_one(make_tokenizer, chatml):
    tokenizer = make_tokenizer(add_bos=True, chat_template=chatml)
    prompts = ["the fox", MESSAGES, "<s><|im_start|>user\n", ""]
    together = encode_rendered(tokenizer, [render_generation_prompt(tokenizer, prompt) for prompt in prompts])
    assert together == [encode_generation_prompt(tokenizer, prompt) for prompt in prompts]
    assert encode_rendered(tokenizer, []) == []


def test_saved_tokenizer_loads_again(make_tokenizer, chatml, tmp_path):
    tokenizer = make_tokenizer(chat_template=chatml)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert encode_generation_prompt(loaded, "the fox 🙂") == encode_generation_prompt(tokenizer, "the fox 🙂")


def test_missing_and_empty_tokenizer_folders_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="the folder ~nouser/x does not exist"):
        load_tokenizer("~nouser/x")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_eos_ids_come_from_the_tokenizer_and_all_config_files(make_tokenizer, tmp_path):
    tokenizer = make_tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 11, "text_config": {"eos_token_id": [12]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [13, 14]}))
    assert eos_token_ids(tokenizer, tmp_path) == {tokenizer.eos_token_id, 11, 12, 13, 14}
    assert eos_token_ids(tokenizer, str(tmp_path)) == eos_token_ids(tokenizer, tmp_path)


def test_eos_ids_of_a_loaded_config(make_tokenizer):
    tokenizer = make_tokenizer()
    assert eos_token_ids(tokenizer, LlamaConfig(eos_token_id=[7, 8])) == {tokenizer.eos_token_id, 7, 8}
    assert eos_token_ids(tokenizer, LlamaConfig(eos_token_id=None)) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", r"config\.json is not valid JSON"),
        ("[]", r"config\.json is not a JSON object"),
        ('{"eos_token_id": 1.5}', "eos_token_id is 1.5, but must be a token id or a list of token ids"),
        ('{"eos_token_id": ["x"]}', r"eos_token_id is \['x'\], but must be"),
    ],
)
def test_error_names_a_damaged_config_file(make_tokenizer, tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=expected):
        eos_token_ids(make_tokenizer(), tmp_path)
