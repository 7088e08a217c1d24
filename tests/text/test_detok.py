"""Incremental detokenization: pieces are final, and together exactly what the tokenizer decodes."""

import random
import time

import pytest

from areno.text.detok import IncrementalDetokenizer

TEXTS = [
    "the quick brown fox",
    "  two spaces,  then\n\nlines ",
    "naïve 你好世界 🙂👍🏽 end",
    "🙂",
    "",
    "1 + 1 = 2. stop here",
    "a real � replacement � character",
]


def _pieces(tokenizer, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer


def _ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _decode(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(tokenizer, text):
    ids = _ids(tokenizer, text)
    pieces, detokenizer = _pieces(tokenizer, ids)
    assert detokenizer.text == _decode(tokenizer, ids)
    assert "".join(pieces) + detokenizer.flush() == _decode(tokenizer, ids)


def test_no_piece_holds_half_a_character(tokenizer):
    ids = _ids(tokenizer, "x 你好 🙂👍 y")
    pieces, _ = _pieces(tokenizer, ids)
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == "x 你好 🙂👍 y"


def test_unfinished_character_is_held_back_until_flush(tokenizer):
    ids = _ids(tokenizer, "a🙂")[:-1]
    pieces, detokenizer = _pieces(tokenizer, ids)
    assert "".join(pieces) == "a"
    assert detokenizer.text == _decode(tokenizer, ids)
    assert "a" + detokenizer.flush() == _decode(tokenizer, ids)
    assert detokenizer.flush() == ""


def test_leading_space_of_a_word_is_kept_after_a_special_token(tokenizer):
    eos = tokenizer.eos_token_id
    ids = [*_ids(tokenizer, "the"), eos, *_ids(tokenizer, " fox")]
    for skip in (True, False):
        pieces, detokenizer = _pieces(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == detokenizer.text == _decode(tokenizer, ids, skip)


def test_chat_markers_are_special_too(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids("<|im_end|>"), *_ids(tokenizer, "fox")]
    assert _pieces(tokenizer, ids)[1].text == "fox"
    assert _pieces(tokenizer, ids, skip_special_tokens=False)[1].text.startswith("<|im_end|>")


def test_ids_outside_the_vocabulary_render_as_nothing(tokenizer):
    ids = _ids(tokenizer, "the quick fox")
    padded = [ids[0], *[len(tokenizer) + 7] * 40, *ids[1:]]
    pieces, detokenizer = _pieces(tokenizer, padded)
    assert "".join(pieces) == detokenizer.text == _decode(tokenizer, padded)


@pytest.mark.parametrize("seed", range(30))
def test_random_tokens_of_a_byte_level_model_decode_as_if_all_at_once(make_tokenizer, seed):
    tokenizer = make_tokenizer("byte_level")
    rng = random.Random(seed)
    # Many high bytes, so that most characters are invalid or incomplete.
    ids = [rng.randrange(len(tokenizer)) if rng.random() < 0.3 else rng.randrange(100, 270) for _ in range(120)]
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        shown += detokenizer.push(token_id)
        assert detokenizer.text == _decode(tokenizer, ids[:count])
        assert detokenizer.text.startswith(shown)
    assert shown + detokenizer.flush() == _decode(tokenizer, ids)


@pytest.mark.parametrize("seed", range(10))
def test_random_words_of_a_metaspace_model_decode_as_if_all_at_once(make_tokenizer, seed):
    tokenizer = make_tokenizer("metaspace")
    rng = random.Random(seed)
    ids = [rng.randrange(len(tokenizer) - 256) for _ in range(120)]
    pieces, detokenizer = _pieces(tokenizer, ids)
    assert "".join(pieces) == detokenizer.text == _decode(tokenizer, ids)


def _seconds(tokenizer, ids):
    start = time.perf_counter()
    _pieces(tokenizer, ids)
    return time.perf_counter() - start


@pytest.mark.parametrize("text", ["the quick brown fox ", "🙂"])
def test_cost_per_token_does_not_grow_with_the_text(tokenizer, text):
    ids = _ids(tokenizer, text * 200)
    half_characters = text == "🙂"
    if half_characters:
        first = next(token_id for token_id in ids if tokenizer.decode([token_id]) == "\ufffd")
        ids = [first] * 4000
    short, long = ids[:200], (ids * 20)[:4000]
    _seconds(tokenizer, short)
    assert _seconds(tokenizer, long) < 20 * 5 * max(_seconds(tokenizer, short), 1e-3)
