"""From rows to prompt batches and supervised sequences."""

import json
import random
import re
import time

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areno.api.datasets import iter_prompt_batches, load_rows
from areno.engine.rollout.counter_rng import epoch_order
from areno.errors import DataError, UsageError
from areno.training.objectives.base import RowBounds, row_problem
from areno.training.objectives.sft import build_sft_rows

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('unknown role') }}{% endif %}"
    "<s> {{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word; no template."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = " ".join(["user", "assistant", "system", *(f"w{index}" for index in range(50))])
    specials = ["<unk>", "<s>", "</s>", "<eot>"]
    tokenizer.train_from_iterator([words], trainers.WordLevelTrainer(special_tokens=specials, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def _rows(*lengths):
    return [{"prompt": " ".join(["w1"] * length), "solutions": [index]} for index, length in enumerate(lengths)]


def _batches(rows, tokenizer, **options):
    return list(iter_prompt_batches(rows, tokenizer, **({"batch_size": 2, "max_prompt_tokens": 4} | options)))


def _row_numbers(batches):
    return [[item.solutions[0] for item in batch.items] for batch in batches]


def test_batches_follow_the_row_order_and_the_last_one_may_be_smaller(tokenizer):
    batches = _batches(_rows(1, 2, 3, 4, 1), tokenizer)
    assert _row_numbers(batches) == [[0, 1], [2, 3], [4]]
    assert [batch.scanned for batch in batches] == [2, 2, 1]
    item = batches[0].items[1]
    assert (item.prompt, item.record) == ("w1 w1", {"prompt": "w1 w1", "solutions": [1]})
    assert item.input_tokens == tokenizer("w1 w1", add_special_tokens=False)["input_ids"]


def test_long_prompts_are_skipped_and_counted(tokenizer):
    batches = _batches(_rows(9, 1, 9, 9, 1, 1, 9), tokenizer)
    assert _row_numbers(batches) == [[1, 4], [5]]
    assert [(batch.scanned, batch.skipped_long, batch.total_skipped_long) for batch in batches] == [
        (5, 3, 3),
        (2, 1, 4),
    ]


def test_prompt_exactly_at_the_limit_is_kept(tokenizer):
    assert _row_numbers(_batches(_rows(4, 5), tokenizer)) == [[0]]


@pytest.mark.parametrize("seed", range(20))
def test_resuming_at_the_scanned_position_gives_the_remaining_batches(tokenizer, seed):
    rng = random.Random(seed)
    rows = _rows(*(rng.choice([1, 2, 9]) for _ in range(17)), 1)
    order = epoch_order(len(rows), epoch=seed, seed=1, shuffle=True)
    everything = _batches(rows, tokenizer, order=order)
    position = 0
    for count, batch in enumerate(everything, 1):
        position += batch.scanned
        rest = _batches(rows, tokenizer, order=order, start=position)
        assert _row_numbers(rest) == _row_numbers(everything[count:])
    assert position == len(rows)


def test_rows_follow_the_requested_order(tokenizer):
    assert _row_numbers(_batches(_rows(1, 1, 1), tokenizer, order=[2, 0, 1])) == [[2, 0], [1]]


def test_error_names_the_option_and_the_shortest_prompt_if_all_are_too_long(tokenizer):
    with pytest.raises(UsageError, match=r"all 2 prompts.*--max-prompt-tokens 4.*shortest prompt has 7 tokens"):
        _batches(_rows(9, 7), tokenizer)
    assert _batches(_rows(1, 1, 9), tokenizer, start=2) == []


def test_error_names_a_row_without_the_key(tokenizer):
    rows = [*_rows(1), {"question": "x"}]
    with pytest.raises(DataError) as caught:
        _batches(rows, tokenizer, source="data/train.jsonl")
    message = str(caught.value)
    assert message.startswith("data/train.jsonl, row 2: dataset row must contain `prompt`")
    assert "question" in message
    assert "--dataset-loader-fn" in message


def test_null_prompt_counts_as_missing(tokenizer):
    with pytest.raises(DataError, match=r"row 2: dataset row must contain `prompt`, but `prompt` is null\."):
        _batches(datasets.Dataset.from_list([{"prompt": "w1"}, {"prompt": None}]), tokenizer)


@pytest.mark.parametrize("prompt", [7, [], ["text"], [{"content": "x"}], [{"role": "user"}], {"role": "user"}])
def test_error_names_a_prompt_of_the_wrong_type(tokenizer, prompt):
    with pytest.raises(DataError, match="row 1: `prompt` must be text or a list of messages"):
        _batches([{"prompt": prompt}], tokenizer)


def test_other_keys_can_be_chosen(tokenizer):
    (batch,) = _batches([{"q": "w1", "a": [5]}], tokenizer, prompt_key="q", solutions_key="a")
    assert batch.items[0].solutions == [5]


def test_chat_messages_are_rendered_and_arrow_padding_is_removed(chat_tokenizer):
    rows = datasets.Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "w1", "name": None}]},
            {"prompt": [{"role": "user", "content": "w2", "name": "x"}]},
        ]
    )
    (batch,) = _batches(rows, chat_tokenizer, max_prompt_tokens=9)
    assert batch.prompts == ["<s> user w1 <s> assistant", "<s> user w2 <s> assistant"]


def test_error_names_the_row_whose_messages_the_template_refuses(chat_tokenizer):
    rows = [{"prompt": "w1"}, {"prompt": [{"role": "bad", "content": "x"}]}]
    with pytest.raises(DataError, match=r"f\.jsonl, row 2: .*unknown role"):
        _batches(rows, chat_tokenizer, max_prompt_tokens=9, source="f.jsonl")


def _sft(rows, tokenizer, **options):
    limits = {"max_prompt_tokens": 4, "max_new_tokens": 3, "eos_token_ids": frozenset({2})}
    return build_sft_rows(rows, tokenizer, RowBounds(**(limits | options)))


def test_supervised_sequence_is_prompt_response_and_eos(tokenizer):
    (row,), dropped = _sft([{"prompt": "w1 w2", "response": "w3 w4"}], tokenizer)
    ids = tokenizer("w1 w2 w3 w4", add_special_tokens=False)["input_ids"]
    assert row.tokens == [*ids, 2]
    assert row.prompt_mask == [True, True, False, False, False]
    assert row.trainable() == [False, False, True, True, True]
    assert (row.eos_token_id, dropped) == (2, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "w1 w2", "answer": "w3 w4"},
        {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]},
    ],
)
def test_questions_and_conversations_are_supervised_rows_too(chat_tokenizer, row):
    (sequence,), dropped = _sft([row], chat_tokenizer, max_prompt_tokens=9)
    (plain,), _ = _sft([{"prompt": "w1 w2", "response": "w3 w4"}], chat_tokenizer, max_prompt_tokens=9)
    assert (sequence.tokens, sequence.prompt_mask, dropped) == (plain.tokens, plain.prompt_mask, 0)


def test_errors_about_rows_without_an_answer_name_the_loader_setting(tokenizer):
    rows = [{"messages": [{"role": "user", "content": "w1"}]}]
    with pytest.raises(
        DataError, match=r"contain `prompt`, but its keys are: messages\. Use train_dataset\.dataset_kwargs"
    ):
        _sft(rows, tokenizer, loader="train_dataset.dataset_kwargs.loader")
    with pytest.raises(DataError, match=r"none of 1 rows can be used with max_length 2: "):
        _sft([{"question": "w1", "answer": "w2 w2"}], tokenizer, context_limit=2, limits="max_length 2")


@pytest.mark.parametrize("content", ["w2", None])
def test_a_conversation_that_ends_with_a_tool_call_is_refused(chat_tokenizer, content):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    last = {"role": "assistant", "content": content, "tool_calls": [call]}
    rows = [{"messages": [{"role": "user", "content": "w1"}, last]}]
    error = (
        r"row 1: the last of `messages` has `tool_calls`, .* In a dataset loader \(--dataset-loader-fn\), "
        "remove the row, or put the calls into"
    )
    with pytest.raises(DataError, match=error):
        _sft(rows, chat_tokenizer)
    assert re.search(error, row_problem("response", rows[0], "data.jsonl"))
    (_,), dropped = _sft(
        [{"messages": [rows[0]["messages"][0], {**last, "content": "w2", "tool_calls": None}]}],
        chat_tokenizer,
        max_prompt_tokens=9,
    )
    assert dropped == 0


def test_eos_is_not_doubled(tokenizer):
    (first, second), _ = _sft(
        [{"prompt": "w1", "response": "w3 </s>"}, {"prompt": "w1", "response": "w3 <eot>"}],
        tokenizer,
        eos_token_ids=frozenset({2, 3}),
    )
    assert first.tokens[-2:] == [tokenizer.convert_tokens_to_ids("w3"), 2]
    assert second.tokens[-2:] == [tokenizer.convert_tokens_to_ids("w3"), 3]


def test_unusable_supervised_rows_are_dropped_and_counted(tokenizer):
    rows = [
        {"prompt": "w1", "response": None},
        {"prompt": "w1", "response": ""},
        {"prompt": "w1 w1 w1 w1 w1", "response": "w2"},
        {"prompt": "w1", "response": "w2 w2 w2"},  # three tokens and EOS
        {"prompt": "w1 w1 w1 w1", "response": "w2 w2"},
    ]
    sequences, dropped = _sft(rows, tokenizer)
    assert ([len(row.tokens) for row in sequences], dropped) == ([7], 4)
    with pytest.raises(
        DataError, match=r"f: none of 4 rows.*--max-prompt-tokens 4.*--max-new-tokens 3.*shortest row has"
    ):
        _sft(rows[:4], tokenizer, source="f")
    with pytest.raises(DataError, match="every response is empty"):
        _sft(rows[:2], tokenizer)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"response": "x"}, "`prompt`"),
        ({"prompt": "w1"}, "`response`"),
        ({"prompt": "w1", "response": 5}, "must be text"),
    ],
)
def test_error_names_a_bad_supervised_row(tokenizer, row, text):
    with pytest.raises(DataError, match=rf"f\.csv, row 2: .*{text}"):
        _sft([{"prompt": "w1", "response": "w2"}, row], tokenizer, source="f.csv")


def test_supervised_prompts_use_the_chat_template(chat_tokenizer):
    (row,), _ = _sft([{"prompt": "w1", "response": "w2"}], chat_tokenizer, max_prompt_tokens=9)
    assert chat_tokenizer.decode(row.tokens) == "<s> user w1 <s> assistant w2 </s>"


def test_epoch_order_is_a_reproducible_permutation():
    random.seed(1)
    first = epoch_order(100, epoch=0, seed=5, shuffle=True)
    random.seed(2)
    assert first == epoch_order(100, epoch=0, seed=5, shuffle=True)
    assert sorted(first) == list(range(100))
    orders = {tuple(epoch_order(100, epoch=epoch, seed=seed, shuffle=True)) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9
    assert epoch_order(4, epoch=3, seed=5, shuffle=False) == [0, 1, 2, 3]
    assert epoch_order(10, epoch=1, seed=0, shuffle=True) == [6, 1, 7, 4, 3, 8, 2, 5, 0, 9], "stable between versions"


def test_global_random_state_is_left_alone():
    random.seed(7)
    expected = random.random()
    random.seed(7)
    epoch_order(10, epoch=0, seed=0, shuffle=True)
    assert random.random() == expected


def test_thousands_of_real_rows_are_tokenized_in_seconds(gsm8k, tiny_checkpoint, tmp_path):
    from areno.text.chat import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_checkpoint))
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for line in (gsm8k / "train.jsonl").open():
            row = json.loads(line)
            file.write(json.dumps({"prompt": row["question"], "response": row["answer"]}) + "\n")
    start = time.perf_counter()
    rows = load_rows(str(path))
    sequences, dropped = _sft(rows, tokenizer, max_prompt_tokens=4096, max_new_tokens=4096)
    assert time.perf_counter() - start < 20
    assert (len(sequences), dropped) == (7473, 0)


@pytest.mark.parametrize(
    ("needs", "row", "missing"),
    [
        ("prompt", {"text": "x"}, "must contain `prompt`"),
        ("prompt", {"prompt": "x"}, ""),
        ("response", {"question": "x", "answer": "y"}, ""),
        ("response", {"prompt": "x"}, "must contain `response`"),
        ("pair", {"prompt": "x", "chosen": "y", "rejected": "z"}, ""),
        ("pair", {"chosen": "y", "rejected": "z"}, "must contain `prompt`"),
        ("pair", {"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "x"}]}, ""),
        ("pair", {"prompt": "x", "chosen": "y"}, "must contain `rejected`"),
    ],
)
def test_missing_keys_of_the_first_row_are_reported_without_a_tokenizer(needs, row, missing):
    problem = row_problem(needs, row, "data.jsonl")
    assert missing in problem
    assert bool(problem) == bool(missing)
