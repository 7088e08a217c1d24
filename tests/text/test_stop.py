"""Stop strings against the slow and obvious way: decode everything after each token, and search it."""

import random

import pytest

from areno.text.stop import StopChecker


def _decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _slow(tokenizer, ids, stop):
    """(tokens consumed, text) of a search in the whole text after each token."""
    for count in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[:count])
        hits = [text.find(string) for string in stop if string in text]
        if hits:
            return count, text[: min(hits)]
    return None, _decode(tokenizer, ids)


def _fast(tokenizer, ids, stop):
    checker = StopChecker(tokenizer, stop)
    for count, token_id in enumerate(ids, 1):
        if checker.push(token_id):
            assert checker.push(ids[0]), "a stopped checker stays stopped"
            return count, checker.text
    return None, checker.text


ALPHABET = ["the", " ", "quick", "fox", "\n", "1", "+", "=", "é", "你", "好", "🙂", "st", "op", ". ", "a", "b"]


@pytest.mark.parametrize("seed", range(60))
def test_stops_exactly_where_searching_the_whole_text_would(tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 40)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stop = []
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.6:
            start = rng.randrange(len(text))
            stop.append(text[start : start + rng.randrange(1, 9)])
        else:
            stop.append("".join(rng.choices(ALPHABET, k=rng.randrange(1, 4))))
    assert _fast(tokenizer, ids, stop) == _slow(tokenizer, ids, stop)


def test_stop_string_across_token_boundaries_is_found(make_tokenizer):
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer("fox\n\nzqzq tail", add_special_tokens=False)["input_ids"]
    assert _fast(tokenizer, ids, ["zqz"])[1] == "fox\n\n"


def test_token_that_completes_more_than_the_stop_string_is_cut(make_tokenizer):
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer("the quick", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    assert _fast(tokenizer, ids, ["ui"]) == (2, "the q")


def test_earliest_of_several_stop_strings_wins(tokenizer):
    ids = tokenizer("the quick", add_special_tokens=False)["input_ids"]
    assert _fast(tokenizer, ids, ["k", "u", "ck"])[1] == "the q"


def test_special_tokens_can_be_stop_strings_when_they_are_shown(tokenizer):
    ids = [*tokenizer("fox", add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")]
    checker = StopChecker(tokenizer, ["<|im_end|>"], skip_special_tokens=False)
    assert [checker.push(token_id) for token_id in ids][-1]
    assert checker.text == "fox"
    hidden = StopChecker(tokenizer, ["<|im_end|>"])
    assert not any(hidden.push(token_id) for token_id in ids)


def test_without_stop_strings_the_whole_text_is_returned(tokenizer):
    ids = tokenizer("the quick brown fox 🙂", add_special_tokens=False)["input_ids"]
    assert _fast(tokenizer, ids, []) == (None, "the quick brown fox 🙂")


def test_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ValueError, match="empty"):
        StopChecker(tokenizer, ["x", ""])
