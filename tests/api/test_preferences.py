"""From preference rows to pairs of training sequences, against sequences written out by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areno.api.datasets import load_rows
from areno.errors import DataError
from areno.training.objectives.base import RowBounds
from areno.training.objectives.pairs import build_preference_rows
from tests.support.examples import examples
from tests.support.tiny import bpe_tokenizer

WORDS = ["user", "assistant", *(f"w{index}" for index in range(20))]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('unknown role') }}{% endif %}"
    "<s> {{ m.role }} {{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word; no template."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["<unk>", "<s>", "</s>", "<stop>"]
    tokenizer.train_from_iterator(
        [" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=specials, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def build(rows, tokenizer, **options):
    settings = {"max_prompt_tokens": 20, "max_new_tokens": 10, "eos_token_ids": frozenset(), "source": "data"}
    return build_preference_rows(rows, tokenizer, RowBounds(**(settings | options)))


def words(tokenizer, row):
    """A sequence as (context, answer) in words."""
    tokens = tokenizer.convert_ids_to_tokens(row.tokens)
    context = sum(row.prompt_mask)
    assert row.prompt_mask == [True] * context + [False] * (len(tokens) - context)
    return " ".join(tokens[:context]), " ".join(tokens[context:])


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_text_answers_follow_the_prompt_and_end_with_eos(tokenizer):
    rows = [
        {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"},
        {"prompt": "w6", "chosen": "w7 </s>", "rejected": "w8 <stop>"},
    ]
    stop = tokenizer.convert_tokens_to_ids("<stop>")
    pairs, dropped = build(rows, tokenizer, eos_token_ids=frozenset({stop}))
    assert dropped == 0
    assert [[words(tokenizer, row) for row in pair] for pair in pairs] == [
        [("w1 w2", "w3 </s>"), ("w1 w2", "w4 w5 </s>")],
        [("w6", "w7 </s>"), ("w6", "w8 <stop>")],
    ]
    assert [[row.group for row in pair] for pair in pairs] == [[0, 0], [1, 1]]
    assert {row.eos_token_id for pair in pairs for row in pair} == {tokenizer.eos_token_id}


TRANSCRIPTS = {
    "chosen": "\n\nHuman: w1\n\nAssistant: w2\n\nHuman: w3\n\nAssistant: w4 w5",
    "rejected": "\n\nHuman: w1\n\nAssistant: w2\n\nHuman: w3\n\nAssistant: w6",
}


def test_transcripts_are_conversations(chat_tokenizer):
    asked = [("user", "w1"), ("assistant", "w2"), ("user", "w3")]
    as_messages = {
        "chosen": chat(*asked, ("assistant", "w4 w5")),
        "rejected": chat(*asked, ("assistant", "w6")),
    }
    actual, expected = (build([row], chat_tokenizer, max_prompt_tokens=60)[0] for row in (TRANSCRIPTS, as_messages))
    assert [(row.tokens, row.prompt_mask) for row in actual[0]] == [
        (row.tokens, row.prompt_mask) for row in expected[0]
    ]


def test_transcripts_without_a_template_stay_text(tokenizer):
    ((chosen, rejected),), dropped = build([TRANSCRIPTS], tokenizer, max_prompt_tokens=60)
    assert dropped == 0
    assert [words(tokenizer, row)[1] for row in (chosen, rejected)] == ["w4 w5 </s>", "w6 </s>"]
    assert words(tokenizer, chosen)[0] == words(tokenizer, rejected)[0]


def test_transcripts_that_do_not_answer_the_same_prompt_are_dropped(tokenizer, chat_tokenizer):
    unanswered = {"chosen": "\n\nHuman: w1\n\nAssistant: w2\n\nHuman: w3", "rejected": TRANSCRIPTS["rejected"]}
    empty = {"chosen": "\n\nHuman: w1\n\nAssistant: ", "rejected": "\n\nHuman: w1\n\nAssistant: w2"}
    assert build([TRANSCRIPTS, unanswered, empty], chat_tokenizer, max_prompt_tokens=60)[1] == 2
    other = {"chosen": "\n\nHuman: w1\n\nAssistant: w2", "rejected": "\n\nHuman: w3\n\nAssistant: w2"}
    tokenizer.chat_template = None
    assert build([TRANSCRIPTS, unanswered, empty, other], tokenizer, max_prompt_tokens=60)[1] == 3


def test_prompts_are_rendered_by_the_chat_template_as_for_generation(chat_tokenizer):
    rows = [
        {"prompt": "w1", "chosen": "w2", "rejected": "w3"},
        {"prompt": chat(("user", "w1"), ("assistant", "w4"), ("user", "w5")), "chosen": "w2", "rejected": "w3"},
    ]
    pairs, _ = build(rows, chat_tokenizer)
    assert words(chat_tokenizer, pairs[0][0]) == ("<s> user w1 </s> <s> assistant", "w2 </s>")
    long = "<s> user w1 </s> <s> assistant w4 </s> <s> user w5 </s> <s> assistant"
    assert words(chat_tokenizer, pairs[1][1]) == (long, "w3 </s>")


@pytest.mark.parametrize(
    "row",
    [
        {
            "chosen": chat(("user", "w1"), ("assistant", "w2 w3")),
            "rejected": chat(("user", "w1"), ("assistant", "w4")),
        },
        {
            "prompt": "w9 is not used, because the conversations are whole",
            "chosen": chat(("user", "w1"), ("assistant", "w2 w3")),
            "rejected": chat(("user", "w1"), ("assistant", "w4")),
        },
        {"prompt": "w1", "chosen": chat(("assistant", "w2 w3")), "rejected": chat(("assistant", "w4"))},
        {
            "prompt": chat(("user", "w1")),
            "chosen": chat(("assistant", "w2 w3")),
            "rejected": chat(("assistant", "w4")),
        },
    ],
)
def test_the_common_prefix_of_conversations_is_context(row, chat_tokenizer):
    pairs, _ = build([row], chat_tokenizer)
    chosen, rejected = pairs[0]
    assert words(chat_tokenizer, chosen) == ("<s> user w1 </s> <s> assistant", "w2 w3 </s>")
    assert words(chat_tokenizer, rejected) == ("<s> user w1 </s> <s> assistant", "w4 </s>")


def test_the_common_prefix_of_two_answers_is_context_too(chat_tokenizer):
    row = {
        "chosen": chat(("user", "w1"), ("assistant", "w5 w2"), ("user", "w6"), ("assistant", "w7")),
        "rejected": chat(("user", "w1"), ("assistant", "w5 w3")),
    }
    chosen, rejected = build([row], chat_tokenizer)[0][0]
    assert words(chat_tokenizer, chosen)[1] == "w2 </s> <s> user w6 </s> <s> assistant w7 </s>"
    assert words(chat_tokenizer, rejected) == ("<s> user w1 </s> <s> assistant w5", "w3 </s>")


def test_messages_in_a_file_may_have_different_keys(chat_tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"chosen": [{"role": "user", "content": "w1", "name": "me"}, {"role": "assistant", "content": "w2"}], '
        '"rejected": [{"role": "user", "content": "w1", "name": "me"}, {"role": "assistant", "content": "w3"}]}\n'
    )
    pairs, dropped = build(load_rows(str(tmp_path / "rows.jsonl")), chat_tokenizer)
    assert dropped == 0
    assert words(chat_tokenizer, pairs[0][0])[1] == "w2 </s>"


def test_empty_equal_and_long_pairs_are_dropped_and_counted_without_gaps_in_the_groups(tokenizer):
    good = {"prompt": "w1 w2", "chosen": "w3", "rejected": "w4"}
    rows = [
        good | {"chosen": ""},
        good | {"rejected": []},
        good | {"rejected": "w3"},
        good,
        good | {"rejected": " ".join(["w3"] * 28)},  # 2 + 28 + EOS is one more than 20 + 10
        good | {"chosen": " ".join(["w3"] * 27)},
    ]
    pairs, dropped = build(rows, tokenizer)
    assert dropped == 4
    assert [[row.group for row in pair] for pair in pairs] == [[0, 0], [1, 1]]
    assert len(pairs[1][0].tokens) == 30


def test_a_prompt_may_exceed_its_own_limit_if_the_total_does_not(tokenizer):
    row = {"prompt": " ".join(["w1"] * 26), "chosen": "w3", "rejected": "w4"}
    assert len(build([row], tokenizer)[0]) == 1


def test_an_answer_of_one_token_without_context_has_nothing_to_train(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>")
    rows = [{"prompt": "", "chosen": "w1", "rejected": "w2 w3"}, {"prompt": "", "chosen": "w4 w1", "rejected": "w2 w3"}]
    pairs, dropped = build(rows, bare)
    assert dropped == 1
    assert all(any(row.trainable()) for pair in pairs for row in pair)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"chosen": "w1", "rejected": "w2"},
            r"data, row 2: dataset row must contain `prompt`, but its keys are: chosen, rejected",
        ),
        ({"prompt": "w1", "rejected": "w2"}, r"row 2: dataset row must contain `chosen`"),
        ({"prompt": "w1", "chosen": "w1", "rejected": None}, r"row 2: dataset row must contain `rejected`"),
        ({"prompt": "w1", "chosen": 5, "rejected": "w2"}, r"row 2: `chosen` must be text or a list .* got 5"),
        ({"prompt": 7, "chosen": "w1", "rejected": "w2"}, r"row 2: `prompt` must be text or a list .* got 7"),
        (
            {"prompt": "w1", "chosen": "w1", "rejected": chat(("assistant", "w2"))},
            r"row 2: `chosen` and `rejected` must be two texts or two lists of messages, got str and list",
        ),
        (
            {"chosen": chat(("assistant", "w1")), "rejected": chat(("user", "w1"))},
            r"row 2: `chosen` begins with an assistant message, but the row has no `prompt`",
        ),
        (
            {"chosen": [{"content": "w1"}], "rejected": chat(("user", "w1"))},
            r"row 2: `chosen` must be text or a list of messages with role and content",
        ),
        (
            {"chosen": chat(("user", "w1"), ("bad", "w2")), "rejected": chat(("user", "w1"))},
            r"row 2: the chat template rejects messages with the roles user, bad: unknown role",
        ),
        (
            {"prompt": chat(("bad", "w1")), "chosen": "w1", "rejected": "w2"},
            r"row 2: .* messages with the roles bad",
        ),
    ],
)
def test_errors_name_source_number_and_key_of_an_unusable_row(row, text, chat_tokenizer):
    with pytest.raises(DataError, match=text):
        build([{"prompt": "w1", "chosen": "w2", "rejected": "w3"}, row], chat_tokenizer)


def test_conversations_without_a_chat_template_are_refused(tokenizer):
    row = {"chosen": chat(("user", "w1")), "rejected": chat(("user", "w2"))}
    with pytest.raises(DataError, match=r"row 1: .*the tokenizer has no chat template"):
        build([row], tokenizer)


def test_a_data_set_without_a_usable_pair_is_refused_with_its_shortest_lengths(tokenizer):
    rows = [
        {"prompt": "w1 w2", "chosen": "w3 w4 w5", "rejected": "w3"},
        {"prompt": "w1 w2", "chosen": "w3 w4 w5 w6", "rejected": "w3"},
    ]
    match = (
        r"none of 2 rows .*--max-prompt-tokens 2 and --max-new-tokens 2.* has 6 tokens and the rejected sequence has 4"
    )
    with pytest.raises(DataError, match=match):
        build(rows, tokenizer, max_prompt_tokens=2, max_new_tokens=2)
    with pytest.raises(DataError, match="every pair has an empty answer"):
        build([{"prompt": "w1", "chosen": "", "rejected": "w1"}], tokenizer)


TEXT = st.text(st.sampled_from("abc 12\né<|end|>"), min_size=0, max_size=12)
BYTE_TOKENIZER = bpe_tokenizer(["abc 12 bca 21"], vocab=270)


def encoded_by_hand(prompt, answer):
    """Token ids of prompt and answer, built by hand from the tokenizer's template."""
    ids = BYTE_TOKENIZER.encode(f"<|user|>{prompt}<|end|><|assistant|>") + BYTE_TOKENIZER.encode(answer)
    return ids if answer.endswith("<|end|>") else [*ids, BYTE_TOKENIZER.eos_token_id]


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(st.lists(st.fixed_dictionaries({"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}), min_size=1, max_size=6))
def test_every_kept_pair_encodes_its_row_and_every_row_is_kept_or_counted(rows):
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs, dropped = build([*rows, good], BYTE_TOKENIZER, max_prompt_tokens=12, max_new_tokens=8)
    expected = []
    for row in [*rows, good]:
        chosen, rejected = (encoded_by_hand(row["prompt"], row[key]) for key in ("chosen", "rejected"))
        if row["chosen"] and row["rejected"] and chosen != rejected and max(len(chosen), len(rejected)) <= 20:
            expected.append((chosen, rejected))
    assert [(chosen.tokens, rejected.tokens) for chosen, rejected in pairs] == expected
    assert [(chosen.group, rejected.group) for chosen, rejected in pairs] == [(i, i) for i in range(len(pairs))]
    assert len(pairs) + dropped == len(rows) + 1
